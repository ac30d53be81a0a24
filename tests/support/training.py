"""Answers of the tiny model to a few prompts, to learn from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.models import QUIET
from paceline.runtime.model import Model
from paceline.runtime.result import Result
from paceline.runtime.stream import Stream
from paceline_lab.learn.answers import Answer, Settings, make_answers, read_answers

WORDS = ["Hello", "this is one and the user", "2 + 2 = 12, and the", "a", "the"]
SHORT = Settings(max_tokens=12)
LOOPS = {"Paris": 96, "banana": 64}
"""Prompts whose greedy answers go round in circles, and how many tokens it takes to notice."""


class Asked(Model):
    """Knows which prompts it was asked, and may be told to stop at one."""

    def __init__(self, model: Model, stop_at: int | None = None, **always: Any) -> None:
        super().__init__(model.files, model.engine)
        self.prompts: list[list[int]] = []
        self._stop_at = stop_at
        self._always = always

    def stream(self, prompt: Any, **options: Any) -> Stream:
        if len(self.prompts) == self._stop_at:
            raise KeyboardInterrupt
        self.prompts.append(prompt)
        return super().stream(prompt, **options, **self._always)


def make(
    model: Model, prompts: Path, out: Path, settings: Settings = SHORT, **options: Any
) -> dict[int, Answer]:
    """Number -> answer, of those in `out` then."""
    make_answers(model, prompts, out, settings, **{"at_once": 3, "progress": QUIET, **options})
    return answers_in(out)


def answers_in(out: Path) -> dict[int, Answer]:
    answers = read_answers(out)
    by_number = {answer.number: answer for answer in answers}
    assert len(by_number) == len(answers), "no answer is there twice"
    return by_number


def alone(model: Model, prompt: Any, **options: Any) -> Result:
    return model.generate(prompt, **{"drafter": "none", "max_tokens": 12, **options})


def other_weights(model: Model) -> Model:
    return Model(replace(model.files, fingerprint="f" * 64), model.engine)
