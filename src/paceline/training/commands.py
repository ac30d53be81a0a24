"""What the commands `train ...` do; printing is the command line's."""

from collections.abc import Sequence
from pathlib import Path

from paceline.bench.commands import Report
from paceline.models import Progress
from paceline.runtime import load
from paceline.training.answers import Settings, make_answers
from paceline.training.prompts import LONGEST_PROMPT, write_prompts

_OPENING = 64
"""Slots for the part of the chat template that stands before the user's words."""


def prompts(
    target: str,
    out: Path,
    *,
    count: int,
    temperature: float,
    seed: int,
    at_once: int,
    threads: int | None,
    progress: Progress,
) -> Report:
    """Prompts that the target makes up."""
    slots = at_once * (_OPENING + LONGEST_PROMPT)
    # One row a sequence: twice the tokens a second, and a prompt need not be exact.
    model = load(target, rows=1, cache_tokens=slots, threads=threads, progress=progress)
    found = write_prompts(
        model,
        out,
        count=count,
        seed=seed,
        temperature=temperature,
        at_once=at_once,
        progress=progress,
    )
    return Report({"prompts": found, "file": str(out)}, text=f"{found} prompts in {out}")


def answers(
    target: str,
    files: Sequence[Path],
    out: Path,
    *,
    max_tokens: int,
    temperatures: Sequence[float],
    seed: int,
    at_once: int,
    threads: int | None,
    progress: Progress,
) -> Report:
    """The target's answers, as a folder."""
    settings = Settings(max_tokens, tuple(temperatures), seed)
    slots = at_once * (settings.longest_prompt + max_tokens)
    model = load(target, rows=1, cache_tokens=slots, threads=threads, progress=progress)
    made = make_answers(model, files, out, settings, at_once=at_once, progress=progress)
    text = f"{made['answers']} answers, {made['answer_tokens']} tokens, in {out}"
    return Report(made, text=text)
