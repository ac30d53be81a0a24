"""An engine that breaks exactness in one way, to test the checks of exactness."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.engines.base import Engine, StepResult

Change = Callable[[np.ndarray, int, int], None]
"""Gets [rows, vocab] to change, the block's T, and how many sequences the call had."""


def by_block_length(rows: np.ndarray, length: int, _: int) -> None:
    rows[:, 0] += np.float32(1e-4 * length)


def by_company(rows: np.ndarray, _: int, sequences: int) -> None:
    if sequences > 1:
        rows[:, 3] += np.float32(1e-4)


def other_picks_when_drafting(rows: np.ndarray, length: int, _: int) -> None:
    if len(rows) == length > 1:
        rows[0] = -rows[0]


class FaultyEngine:
    def __init__(self, engine: Engine, change: Change) -> None:
        self._engine = engine
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def describe(self) -> dict[str, str]:
        return {**self._engine.describe(), "fault": self._change.__name__}

    def step(self, work: Sequence[Any]) -> StepResult:
        result = self._engine.step(work)
        logits = [rows.copy() for rows in result.logits]
        for rows, (_, block) in zip(logits, work, strict=True):
            self._change(rows, len(block.tokens), len(work))
        return result._replace(logits=logits)
