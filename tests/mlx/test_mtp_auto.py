"""`auto` with a head that is always wrong: it asks ever less, by a simulated clock."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.decoding.auto import Acceptance, Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, DecodeOutcome
from paceline_mlx.heads import drafter as shared_part
from paceline_mlx.heads.cache import ChainCache, NewRows
from paceline_mlx.heads.drafter import MtpDrafter
from paceline_mlx.heads.network import DraftCost

pytestmark = pytest.mark.mlx

COSTS = CostTable({1: 1.0, 8: 1.4, 16: 2.0})
"""In calls of one row."""
STEPS = 300


class WrongHead:
    """Claims that its drafts are right with probability `claims`; counts what they take."""

    config = SimpleNamespace(vocab_size=16)

    def __init__(self, first: float, step: float, row: float, claims: float) -> None:
        """Seconds of a chain's first draft, of each further one, and of a row that it reads."""
        self._first, self._step, self._row, self._claims = first, step, row, claims
        self.cost = DraftCost()
        self.asked = 0
        self.seconds = 0.0
        self.read: list[int] = []
        """Positions of all rows that it read."""

    def tapped(self, taps: Any, rows: int) -> Any:
        import mlx.core as mx

        return mx.array(taps["tap.0"][:rows])

    def prefill(self, cache: ChainCache, rows: NewRows) -> None:
        added = range(rows.start, rows.start + len(rows.following))
        cache.positions += added
        self.read += added
        self.seconds += self._row * len(rows.following)

    def draft(
        self, cache: ChainCache, rows: NewRows, limit: int, least: float, **_: Any
    ) -> tuple[list[int], list[float]]:
        self.prefill(cache, rows)
        count, likely = 1, self._claims
        while count < limit and likely >= least:
            count, likely = count + 1, likely * self._claims
        self.asked += 1
        self.seconds += self._first + self._step * (count - 1)
        return [7] * count, [self._claims] * count


def answered(head: Any, acceptance: Acceptance) -> float:
    """Seconds of the target's calls in an answer in which no draft is right."""
    drafter = MtpDrafter(head, ChainCache(), Sampling(), 0, 8)
    policy = Auto(16, COSTS, acceptance)
    context, seconds = [1], 0.0
    for _ in range(STEPS):
        draft = policy.draft([drafter], context, 15)
        rows = len(draft.tokens) + 1
        taps = {"tap.0": np.zeros((rows, 8), np.float32)}
        block = ComputedBlock([context[-1], *draft.tokens], len(context) - 1, 1, taps)
        drafter.observe(block)
        policy.observe(DecodeOutcome(draft, 0, COSTS(rows), [1]))
        context.append(1)
        seconds += COSTS(rows)
    return seconds


@pytest.mark.parametrize(
    ("first", "step", "row", "claims"),
    [(0.05, 0.04, 0.001, 0.95), (0.3, 0.2, 0.004, 0.6), (2.0, 1.0, 0.01, 0.2)],
    ids=["cheap", "usual", "dear"],
)
def test_a_head_that_is_always_wrong_costs_a_few_hundredths(
    first: float, step: float, row: float, claims: float, monkeypatch: pytest.MonkeyPatch
):
    head: Any = WrongHead(first, step, row, claims)
    monkeypatch.setattr(shared_part, "perf_counter", lambda: head.seconds)
    acceptance = Acceptance()
    answers = 4
    taken = 0.0
    for _ in range(answers):
        acceptance = acceptance.discounted()
        before = len(head.read)
        taken += answered(head, acceptance)
        # What it did not draft after, it read all the same, once.
        assert len(head.read) - before == len({*head.read[before:]}) <= STEPS
    assert taken + head.seconds < 1.05 * answers * STEPS * COSTS(1)
    assert 0 < head.asked <= answers * STEPS / 20
