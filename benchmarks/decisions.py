"""Typed decisions: how much the place of an option counts, and what questions cost.

    python benchmarks/decisions.py bias MODEL spec_bench/question.jsonl
    python benchmarks/decisions.py cost MODEL QUESTIONS ROUNDS [URL]

`bias` asks 50 questions with two options about prompts of Spec-Bench, in both orders. `cost` asks
questions about one input of 2,000 tokens, in turns with `max_tokens=1` answers to the same
chats, whose input is in the cache; or with llama.cpp's server at URL (`llama_server.py`). That one
takes models for decisions alone: a copy of the model's file with `llama.decision.type` openjev and
a template `systemone` that renders the same chats. Each prints a record as JSON.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import httpx

import paceline
from paceline.runtime.decisions import read_questions

TASKS = {
    "translation": "a translation",
    "summarization": "a summary of an article",
    "qa": "the answer to a question about facts",
    "math_reasoning": "the solution of a calculation",
    "coding": "a program",
}
"""Category of Spec-Bench -> what its prompts ask for."""

ASKED = 50
INPUT_TOKENS = 2000


ASK = "What does the message above ask for?"


def bias(model: paceline.Model, suite: Path) -> dict[str, Any]:
    """Return how choices between two options depend on the order of the options."""
    lines = [json.loads(line) for line in suite.read_text(encoding="utf-8").splitlines()]
    of_task = {task: [one for one in lines if one["category"] == task] for task in TASKS}
    first, right, right_mean, flipped = [], 0, 0, 0
    for number in range(ASKED):
        task = [*TASKS][number % len(TASKS)]
        other = [*TASKS][(number + 1 + number // len(TASKS) % 4) % len(TASKS)]
        prompt = of_task[task][number // len(TASKS)]["turns"][0][:2000]
        chosen = []
        for options in ((task, other), (other, task)):
            choices = [{"value": TASKS[one]} for one in options]
            question = {"type": "choice", "instructions": ASK, "choices": choices}
            (answer,) = model.decide(prompt, [question]).answers
            first.append(answer.probabilities[0])
            chosen.append(answer.probabilities[options.index(task)])
            right += answer.choice == TASKS[task]
        right_mean += fmean(chosen) > 0.5
        flipped += (chosen[0] > 0.5) != (chosen[1] > 0.5)
    return {
        "questions": ASKED,
        "mean_probability_of_the_first_option": round(fmean(first), 3),
        "choices_that_change_with_the_order": flipped,
        "right_of_both_orders": right / (2 * ASKED),
        "right_by_the_mean_of_both_orders": right_mean / ASKED,
    }


def cost(model: paceline.Model, count: int, rounds: int, url: str | None = None) -> dict[str, Any]:
    """Return seconds of `count` questions, and of another way to ask them."""
    words = "The parcel arrived late, the box was open, and nobody answered the telephone. "
    text = words * (INPUT_TOKENS // len(model.tokens(words, raw=True)))
    given = [
        {"type": "predicate", "instructions": f"The customer writes for the {n}. time."}
        for n in range(count)
    ]
    messages = [question.text("AB") for question in read_questions(given)]
    prompts = [
        [{"role": "user", "content": part} for part in (text, message)] for message in messages
    ]
    model.decide(text, given[:1])

    def answers() -> None:
        model.generate(prompts, max_tokens=1, drafter="none", logprobs=2)

    def server() -> None:
        asked = {str(n): {**one, "type": "noul"} for n, one in enumerate(given)}
        body = {"state": text, "questions": asked}
        httpx.post(f"{url}/v1/systemone", json=body, timeout=None).raise_for_status()

    other = "max_tokens=1" if url is None else "llama.cpp"
    contenders: dict[str, Callable[[], object]] = {
        "decide": lambda: model.decide(text, given),
        other: answers if url is None else server,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            started = perf_counter()
            run()
            seconds[name].append(perf_counter() - started)
    pairs = zip(seconds["decide"], seconds[other], strict=True)
    ratios = [one / other for one, other in pairs]
    return {"questions": count, "seconds": seconds, "median_ratio": round(median(ratios), 3)}


def main() -> None:
    """Run a measurement and print its record."""
    kind, name, *rest = sys.argv[1:]
    with paceline.load(name) as model:
        if kind == "bias":
            result = bias(model, Path(rest[0]))
        else:
            result = cost(model, int(rest[0]), int(rest[1]), *rest[2:])
        depends = model.engine.describe()
        words = [Path(name).name, *(Path(word).name for word in rest)]
        command = f"python benchmarks/decisions.py {kind} {' '.join(words)}"
    print(json.dumps({"command": command, "engine": depends, **result}, indent=1))


if __name__ == "__main__":
    main()
