"""Answers of the tiny model to a few prompts, and easy ones that were made up, for training."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.models import QUIET
from paceline.runtime.model import Model
from paceline.runtime.result import Result
from paceline.runtime.stream import Stream
from paceline_lab.train.answers import ANSWERS, Answer, Settings, make_answers

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
    model: Model, prompts: Path | list[Path], out: Path, settings: Settings = SHORT, **options: Any
) -> dict[str, Any]:
    paths = [prompts] if isinstance(prompts, Path) else prompts
    return make_answers(model, paths, out, settings, **{"at_once": 3, "progress": QUIET, **options})


def entries(folder: Path) -> dict[int, dict[str, Any]]:
    """Number -> what stands in the file."""
    lines = [json.loads(line) for line in (folder / ANSWERS).read_bytes().splitlines()]
    by_name = {entry["number"]: entry for entry in lines}
    assert len(by_name) == len(lines), "no answer is there twice"
    return by_name


def alone(model: Model, prompt: Any, **options: Any) -> Result:
    return model.generate(prompt, **{"drafter": "none", "max_tokens": 12, **options})


def other_weights(model: Model) -> Model:
    return Model(replace(model.files, fingerprint="f" * 64), model.engine)


LETTERS = range(100, 112)
"""Tokens that the tiny target is ready to say."""


def easy_answers(count: int = 24, length: int = 30) -> list[Answer]:
    """Texts in which each token says which one follows."""
    texts = [[LETTERS[(first + at) % 12] for at in range(8 + length)] for first in range(count)]
    return [Answer(number, text[:8], text[8:]) for number, text in enumerate(texts)]


class Stopped(Exception):
    """As if the process had been ended."""


def stop_at(step: int) -> Callable[[int], None]:
    def reach(done: int) -> None:
        if done == step:
            raise Stopped

    return reach
