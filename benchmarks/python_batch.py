"""Throughput of a list of prompts in Python, against the same prompts one after another.

    python benchmarks/python_batch.py --contexts 4 --prompts 32 --tokens 64 --rounds 3

In each round half of the prompts run one after another, then all in a batch, then the other half.
Prints JSON: tokens per second of both, their ratio by wall time and by the time of processors,
which other programs on the machine disturb less, and how many answers are equal (all should be).
"""

import argparse
import json
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import paceline
from paceline.options import Options

Results = list[paceline.Result]


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--contexts", type=int, default=1)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    years = range(1900, 1900 + arguments.prompts)
    prompts = [f"Write a few sentences about the year {year}." for year in years]
    half = len(prompts) // 2
    options: Options = {
        "max_tokens": arguments.tokens,
        "temperature": 0.0,
        "drafter": arguments.drafter,
    }
    with paceline.load(
        arguments.model, engine=arguments.engine, contexts=arguments.contexts
    ) as model:

        def alone(some: list[str]) -> Results:
            return [model.generate(prompt, **options) for prompt in some]

        alone(prompts[:1])
        model.generate(prompts[:2], **options)  # what is measured or compiled once
        for _ in range(arguments.rounds):
            first = timed(lambda: alone(prompts[:half]))
            batch = timed(lambda: model.generate(prompts, **options))
            second = timed(lambda: alone(prompts[half:]))
            print(json.dumps({"engine": model.engine.name, **compared(first, second, batch)}))


Timed = tuple[Results, float, float]
"""Answers, and seconds by the clock and of processors."""


def timed(call: Callable[[], Results]) -> Timed:
    """Call, and measure."""
    clock, processors = perf_counter(), process_time()
    results = call()
    return results, perf_counter() - clock, process_time() - processors


def compared(first: Timed, second: Timed, batch: Timed) -> dict[str, Any]:
    """Compare a batch with the two halves of its prompts one after another."""
    alone = [*first[0], *second[0]]
    clock, processors = (first[at] + second[at] for at in (1, 2))
    pairs = zip(alone, batch[0], strict=True)
    count = sum(result.completion_tokens for result in alone)
    return {
        "alone": round(count / clock, 1),
        "batch": round(count / batch[1], 1),
        "ratio": round(clock / batch[1], 2),
        "processor_ratio": round(processors / batch[2], 2),
        "equal": f"{sum(one.token_ids == other.token_ids for one, other in pairs)} of {len(alone)}",
    }


if __name__ == "__main__":
    main()
