"""Runs a drafter trained by paceline in OpenVINO GenAI, to show that its format is standard.

    pip install 'optimum-intel==2.2' 'nncf>=3.4' torch 'transformers>=5' 'diffusers==0.38.0' einops
    python benchmarks/interchange.py --drafter DIR --work DIR

The target is written as a Hugging Face folder, optimum-intel exports target and drafter, and
OpenVINO GenAI loads both. (optimum-intel's DFlash export imports diffusers and einops, and this
version of diffusers goes with its transformers.) Prints the texts with and without the drafter,
and GenAI's statistics of the drafts.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.models import DEFAULT_MODEL, Progress, resolve
from paceline.models.hub.wheel import fetch_member
from paceline.models.names import REGISTRY

PROMPTS = ("Why is the sky blue?", "What is 17 times 4? Show your steps.")
TOKENS = 96
OPTIMUM = "import paceline; from optimum.commands.optimum_cli import main; main()"
"""optimum's command line, after what importing paceline switches off: nncf would report its use."""


def main() -> None:
    """Convert what is missing, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", type=Path, required=True, help="a checkpoint in z-lab's form")
    parser.add_argument("--work", type=Path, required=True, help="a folder for what is made")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    target, drafter = work / "target", work / "drafter"
    if not target.exists():
        export(hugging_face_form(work), target)
        # The tokenizer that transformers reads from a GGUF file splits text differently.
        for path in resolve(DEFAULT_MODEL).folder.glob("openvino_*tokenizer.*"):
            shutil.copy(path, target)
    if not drafter.exists():
        export(options.drafter, drafter)
    plain, speculative = pipeline(target), pipeline(target, drafter)
    for prompt in PROMPTS:
        expected, found = answer(plain, prompt), answer(speculative, prompt)
        metrics = found.extended_perf_metrics.draft_model_metrics
        print(f"--- {prompt}\n{found.texts[0]}")
        print(f"same text as without a drafter: {found.texts[0] == expected.texts[0]}")
        print(f"accepted tokens: {found.extended_perf_metrics.get_num_accepted_tokens()}")
        print(f"draft calls: {len(metrics.raw_metrics.m_durations)}")


def hugging_face_form(work: Path) -> Path:
    """The default model, converted by transformers from its GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = work / "hugging-face"
    if not folder.exists():
        gguf = fetch_member(REGISTRY[DEFAULT_MODEL], work, Progress())
        model: Any = AutoModelForCausalLM.from_pretrained(work, gguf_file=gguf.name)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(work, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def export(source: Path, target: Path) -> None:
    """Export with optimum-intel, weights in int8 per channel."""
    command = [sys.executable, "-c", OPTIMUM, "export", "openvino", "--model", str(source)]
    command += ["--task", "text-generation-with-past", "--trust-remote-code"]
    command += ["--weight-format", "int8", str(target)]
    subprocess.run(command, check=True)


def pipeline(target: Path, drafter: Path | None = None) -> Any:
    """GenAI's pipeline, without the prefix cache, which DFlash does not support there."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    extra = {} if drafter is None else {"draft_model": genai.draft_model(str(drafter), "CPU")}
    return genai.LLMPipeline(str(target), "CPU", scheduler_config=scheduler, **extra)


def answer(pipe: Any, prompt: str) -> Any:
    """A greedy answer."""
    import openvino_genai as genai

    config = genai.GenerationConfig(max_new_tokens=TOKENS, do_sample=False)
    return pipe.generate([prompt], config)


if __name__ == "__main__":
    main()
