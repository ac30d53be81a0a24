"""`auto` with a head that is always wrong: it asks ever less, by a simulated clock."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.decoding.auto import Acceptance, Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, DecodeOutcome
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.cache import ChainCache, NewRows
from paceline_mlx.heads.mtp.drafter import MtpDrafter
from paceline_mlx.heads.mtp.network import ChainCost
from paceline_mlx.heads.network import DraftCost

pytestmark = pytest.mark.mlx

COSTS = CostTable({1: 1.0, 8: 1.4, 16: 2.0})
"""In calls of one row."""
STEPS = 300


class WrongHead:
    """Claims that its drafts are right with probability `claims`; counts what they take."""

    config = SimpleNamespace(vocab_size=16)

    def __init__(self, cost: ChainCost, claims: float) -> None:
        self.cost, self._claims = cost, claims
        self.asked = 0
        self.seconds = 0.0
        self.read: list[int] = []
        """Positions of all rows that it read."""

    def tapped(self, taps: Any, rows: int) -> Any:
        import mlx.core as mx

        return mx.array(taps["tap.0"][:rows])

    def prefill(self, cache: ChainCache, rows: NewRows) -> None:
        self._append(cache, rows)
        self.seconds += self.cost.row * len(rows.following)

    def draft(
        self,
        cache: ChainCache,
        rows: NewRows,
        limit: int,
        least: float,
        *,
        sampler: DraftSampler | None = None,
    ) -> tuple[list[int], list[float]]:
        self._append(cache, rows)
        count, likely = 1, self._claims
        while count < limit and likely >= least:
            count, likely = count + 1, likely * self._claims
        self.asked += 1
        self.seconds += self.cost(len(cache), count, len(rows.following))
        return [7] * count, [self._claims] * count

    def _append(self, cache: ChainCache, rows: NewRows) -> None:
        added = range(rows.start, rows.start + len(rows.following))
        cache.positions += added
        self.read += added


def answered(head: Any, acceptance: Acceptance) -> float:
    """Seconds of the target's calls in an answer in which no draft is right."""
    drafter, policy = (
        MtpDrafter(head, ChainCache(), Sampling(), 0, 8),
        Auto(16, COSTS, acceptance),
    )
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
    ("cost", "claims"),
    [
        (ChainCost(DraftCost(0.05), 0.04, 0.001), 0.95),
        (ChainCost(DraftCost(0.3), 0.2, 0.004), 0.6),
        (ChainCost(DraftCost(2.0), 1.0, 0.01), 0.2),
    ],
    ids=["cheap", "usual", "dear"],
)
def test_a_head_that_is_always_wrong_costs_a_few_hundredths(cost: ChainCost, claims: float):
    head: Any = WrongHead(cost, claims)
    acceptance = Acceptance()
    answers = 4
    taken = 0.0
    for _ in range(answers):
        acceptance = acceptance.discounted()
        taken += answered(head, acceptance)
    total = taken + head.seconds
    assert total < 1.05 * answers * STEPS * COSTS(1)
    assert 0 < head.asked <= answers * STEPS / 20


def test_the_tokens_since_the_last_chain_are_part_of_its_cost():
    head: Any = WrongHead(ChainCost(DraftCost(0.5), 0.0, 0.01), 0.1)
    drafter, context = MtpDrafter(head, ChainCache(), Sampling(), 0, 4), [1]

    def goes_on(tokens: int) -> None:
        taps = {"tap.0": np.zeros((tokens, 8), np.float32)}
        drafter.observe(ComputedBlock([1] * tokens, len(context) - 1, tokens, taps))
        context.extend([1] * tokens)

    goes_on(200)
    assert drafter.cost(4) == pytest.approx(0.5), "a prompt is read once"
    for skipped in (1, 30, 100):
        drafter.propose(context, 4)
        for _ in range(skipped):
            goes_on(1)
        expected, before = drafter.cost(4), head.seconds
        drafter.propose(context, 4)
        assert expected == pytest.approx(0.5 + 0.01 * (skipped - 1))
        assert head.seconds - before == pytest.approx(expected)
        goes_on(1)
    assert head.read == list(range(len(context) - 2))
