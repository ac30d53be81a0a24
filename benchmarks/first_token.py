"""Time to first token of a 1,000-token prompt, against the prefill time of the engine alone.

    python benchmarks/first_token.py --output benchmarks/results/first-token.json

Also the start: from the shell command to the first character of `paceline generate`, model cached.
The model is $PACELINE_MODEL, or the one that paceline has by default.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import paceline
from paceline.cli.options import default_model
from paceline.decoding.types import Block
from paceline.verify.suite import load_suite

CHUNKS = (256, 512, 1000)


def main() -> None:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tokens = options.tokens
    model = paceline.load(default_model())
    text = "\n".join(str(m["content"]) for p in load_suite().prompts for m in p.messages)
    prompt = model.files.tokenizer.encode(text)[:tokens]
    model.generate(prompt, max_tokens=1, temperature=0.0)
    bare: dict[int, list[float]] = {size: [] for size in CHUNKS}
    first: list[float] = []
    for _ in range(options.rounds):
        for size in CHUNKS:
            bare[size].append(_prefill(model, prompt, size))
        # As text, so that tokenization is measured, too.
        text = model.files.tokenizer.decode(prompt)
        result = model.generate(text, raw=True, max_tokens=1, temperature=0.0)
        first.append(result.stats.first_token_seconds * tokens / result.prompt_tokens)
    best = min(median(times) for times in bare.values())
    starts = [_start() for _ in range(3)]
    found = {
        "command": "python benchmarks/first_token.py",
        "engine": model.engine.describe(),
        "prompt_tokens": tokens,
        "bare_prefill_seconds_by_chunk": {size: median(times) for size, times in bare.items()},
        "first_token_seconds": median(first),
        "share_of_bare_rate": best / median(first),
        "start_seconds": median(starts),
    }
    print(json.dumps(found, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def _prefill(model: paceline.Model, prompt: list[int], size: int) -> float:
    sequence = model.engine.open()
    began = perf_counter()
    for at in range(0, len(prompt), size):
        part = prompt[at : at + size]
        model.engine.step([(sequence, Block(part, int(at + size >= len(prompt)), prefill=True))])
        sequence.commit(len(part))
    seconds = perf_counter() - began
    sequence.close()
    return seconds


def _start() -> float:
    command = [sys.executable, "-m", "paceline", "generate", "Hello", "--max-tokens", "8"]
    began = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        return perf_counter() - began


if __name__ == "__main__":
    main()
