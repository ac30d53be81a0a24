"""What kept answers gain in use: free text after many answers of the same kind, and without them.

    python benchmarks/kept_in_use.py --suite question.jsonl --output kept-in-use.json

A model without its table answers most questions of Spec-Bench's conversations, questions and
arithmetic, and keeps the answers in a folder that is removed at the end. Then it answers the others
with `suffix`, with `suffix+kept` and plainly, greedily, interleaved. Times are those of decoding.
Exits with 1 if a token differs from plain decoding's.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

import paceline
from paceline.models import DEFAULT_MODEL, Progress
from paceline.runtime.model import Model
from paceline.verify.suite import CONVERSATION, SuitePrompt, load_suite
from paceline_lab.bench.run.groups import is_loop

KINDS = (CONVERSATION, "qa", "math_reasoning")
HELD_OUT = 6
"""One question of this many is held out."""
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 256}


def main() -> None:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--seen", type=int, default=100_000, help="most tokens to keep first")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    suite = load_suite(options.suite)
    prompts = suite.only(KINDS).prompts
    seen = [prompt for at, prompt in enumerate(prompts) if at % HELD_OUT]
    tested = prompts[::HELD_OUT]
    progress = Progress(sys.stderr)
    with TemporaryDirectory() as folder:
        plain = paceline.load(DEFAULT_MODEL, drafters=["suffix"])
        _ = plain.profile  # in the usual folder, not in the one that is removed
        os.environ["PACELINE_CACHE"] = folder
        keeping = Model(plain.files, plain.engine, keep=True, progress=progress)
        tokens = answered(keeping, seen, options.seen, progress)
        cases = [measured(plain, keeping, prompt) for prompt in tested]
    result = {
        "command": "python benchmarks/kept_in_use.py --suite question.jsonl",
        "engine": plain.engine.describe(),
        "suite_sha256": suite.sha256,
        "kept_tokens": tokens,
        "questions": len(cases),
        "loops": sum(case["loop"] for case in cases),
        "differing": [case["id"] for case in cases if not case["same"]],
        "gain": gains(cases),
        "cases": cases,
    }
    print(json.dumps({**result, "cases": len(cases)}, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(result["differing"]))


def answered(model: Model, prompts: Sequence[SuitePrompt], most: int, progress: Progress) -> int:
    """Answer prompts until `most` tokens are kept; returns how many are."""
    tokens = 0
    with progress.task("answers to keep", len(prompts), unit="answers") as reach:
        for number, prompt in enumerate(prompts, start=1):
            answer = model.generate(prompt.messages, drafter="suffix+kept", **ANSWER)
            if not is_loop(answer.token_ids):
                tokens += len(answer.token_ids)
            reach(number)
            if tokens >= most:
                break
    model.settle()
    return tokens


def measured(plain: Model, keeping: Model, prompt: SuitePrompt) -> dict[str, Any]:
    """Decode one prompt in each way. The first one that keeps its answer has not seen it yet."""
    ways = {"suffix+kept": keeping, "suffix": plain, "none": plain}
    found = {
        drafter: model.generate(prompt.messages, drafter=drafter, **ANSWER)
        for drafter, model in ways.items()
    }
    tokens = found["none"].token_ids
    return {
        "id": prompt.id,
        "kind": prompt.kind,
        "tokens": len(tokens),
        "loop": is_loop(tokens),
        "same": all(each.token_ids == tokens for each in found.values()),
        "seconds": {drafter: each.stats.decode_seconds for drafter, each in found.items()},
    }


def gains(cases: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Kind -> speed with kept answers over that without, and over plain; loops are left out."""
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in cases:
        seconds = case["seconds"]
        if not case["loop"] and case["tokens"] > 1:
            pair = tuple(seconds[each] / seconds["suffix+kept"] for each in ("suffix", "none"))
            ratios[case["kind"]].append(pair)
            ratios["all"].append(pair)
    return {
        kind: {
            "over_suffix": round(geometric_mean(one for one, _ in pairs), 3),
            "over_plain": round(geometric_mean(other for _, other in pairs), 3),
        }
        for kind, pairs in ratios.items()
    }


if __name__ == "__main__":
    main()
