"""What `learn` prints for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.storage.files import megabytes
from paceline_lab.learn.evaluate import LEAST_ANSWERS

_TOPICS = 6
"""Topics that are named."""


def text_of(report: Mapping[str, Any]) -> str:
    """The report of `Learner.report` as text."""
    answers = report["answers"]
    return "\n".join(
        [
            f"{answers['answers']} answers with {answers['tokens']:,} tokens, {answers['loops']} "
            "loops left out",
            *_prompts(report["prompts"]),
            *(line for drafter in report["drafters"] for line in _drafter(drafter)),
        ]
    )


def _prompts(figures: Mapping[str, Any]) -> Iterator[str]:
    if figures["prompts"]:
        topics = [f"{name} {share:.0%}" for name, share in figures["topics"].items()]
        yield (
            f"{figures['prompts']} prompts, {figures['distinct_4_grams']:.0%} of four-word runs "
            f"new: {figures['words']['median']:g} words, {figures['code']:.0%} with code, "
            f"{figures['second_turns']:.0%} second turns; {', '.join(topics[:_TOPICS])}"
        )


def _drafter(drafter: Mapping[str, Any]) -> Iterator[str]:
    kind = drafter["kind"]
    for name, one in drafter["sets"].items():
        yield (
            f"{kind}, {name.replace('_', ' ')}: {one['tokens_per_step']:.2f} tokens a step "
            f"({one['tokens_per_step_before']:.2f} without it), {one['speed']:.2f} times plain "
            f"decoding ({one['speed_before']:.2f}), {one['answers']} answers"
        )
    if drafter["installed"]:
        yield f"{kind} is installed ({megabytes(drafter['bytes'])}): `auto` takes it from now on"
    else:
        yield (
            f"{kind} is not installed: `auto` gains less than 1 % by it, or fewer than "
            f"{LEAST_ANSWERS} answers of a set are here; learning longer may change that"
        )
