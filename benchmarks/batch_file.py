"""Compare `paceline batch` with a loop over `generate`: seconds per prompt, and tokens.

    python benchmarks/batch_file.py SPEC_BENCH [--model smollm2-135m]

First 200 questions to five documents, in random order; the loop runs a sample of them, with and
without the prefix cache. Then prompts without a common beginning. SPEC_BENCH is Spec-Bench's
question.jsonl. Exits with 1 if a token differs.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import paceline
from paceline.cli.app import main as command

_DOCUMENTS = 5
_OPTIONS: Any = {"max_tokens": 8, "temperature": 0, "generation_config": "none"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec_bench", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--questions", type=int, default=40, help="to each document")
    parser.add_argument("--characters", type=int, default=6_000, help="of a document")
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    turns = [json.loads(line)["turns"][0] for line in options.spec_bench.open(encoding="utf-8")]
    long = [turn for turn in turns if len(turn) > 3_000]
    documents = [
        " ".join(long[place::_DOCUMENTS])[: options.characters] for place in range(_DOCUMENTS)
    ]
    short = [turn for turn in turns if len(turn) < 400]
    chosen = random.Random(0)
    asked = [
        f"{text}\n\n{short[number]}" for text in documents for number in range(options.questions)
    ]
    chosen.shuffle(asked)
    record = {
        "model": options.model,
        "documents": compare(options.model, asked, asked[: options.sample], fresh=True),
        "no common beginning": compare(options.model, short[100:140], short[100:140], fresh=False),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return int(any(one["differing"] for one in record.values() if isinstance(one, dict)))


def compare(name: str, prompts: list[str], sample: list[str], *, fresh: bool) -> dict[str, Any]:
    """Run all prompts as a file, and a sample in a loop."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        lines = (json.dumps({"prompt": prompt, **_OPTIONS}) + "\n" for prompt in prompts)
        source.write_text("".join(lines), encoding="utf-8")
        began = perf_counter()
        assert command(["batch", str(source), "-o", str(target), "--model", name]) == 0
        seconds = {"batch": (perf_counter() - began) / len(prompts)}
        bodies = [json.loads(line)["response"]["body"] for line in target.open(encoding="utf-8")]
    model = paceline.load(name)
    model.generate("warm up", max_tokens=2)
    expected = dict(zip(prompts, bodies, strict=True))
    differing = 0
    for way in ("loop", *["loop without cache"] * fresh):
        began = perf_counter()
        for prompt in sample:
            one = model.without_history() if way != "loop" else model
            differing += one.generate(prompt, **_OPTIONS).token_ids != expected[prompt]["token_ids"]
        seconds[way] = (perf_counter() - began) / len(sample)
    model.close()
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(body["prompt_tokens"] for body in bodies),
        "cached_tokens": sum(body["stats"]["cached_tokens"] for body in bodies),
        "seconds_per_prompt": {way: round(value, 3) for way, value in seconds.items()},
        "batch_over": {
            way: round(value / seconds["batch"], 2)
            for way, value in seconds.items()
            if way != "batch"
        },
        "differing": differing,
    }


if __name__ == "__main__":
    sys.exit(main())
