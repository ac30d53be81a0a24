"""Draft lengths of policies, and cost tables."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.costs import CostTable
from paceline.decoding.policy import Adaptive, Fixed, Kelly
from paceline.decoding.types import NO_PROPOSAL, DecodeOutcome, Policy, Proposal
from support.drafters import FixedDrafter, drafted
from support.errors import raises

POLICIES = [Fixed, Adaptive, Kelly]

outcomes = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 15), st.floats(0, 1, allow_nan=False)).map(
        lambda one: outcome(one[0], min(one[1], one[0]), one[2])
    ),
    max_size=30,
)


def outcome(drafted: int, accepted: int, seconds: float = 0.0) -> DecodeOutcome:
    return DecodeOutcome(Proposal([1] * drafted, "ngram"), accepted, seconds)


def after(policy: Policy, seen: Sequence[DecodeOutcome]) -> Policy:
    for one in seen:
        policy.observe(one)
    return policy


@pytest.mark.parametrize("kind", POLICIES)
@given(max_block=st.integers(1, 16), seen=outcomes)
def test_draft_length_is_within_the_largest_block(
    kind: type, max_block: int, seen: list[DecodeOutcome]
):
    assert 0 <= after(kind(max_block), seen).draft_length() <= max_block - 1


@pytest.mark.parametrize("kind", POLICIES)
def test_the_first_nonempty_proposal_is_taken_whole_without_asking_further(kind: type):
    first, second = Proposal([1], "ngram"), Proposal([2], "suffix", 9)
    assert drafted(kind(8), first, second) == first
    assert drafted(kind(8), Proposal((), "ngram"), second) == second
    assert drafted(kind(8)) == NO_PROPOSAL
    later = FixedDrafter(second)
    kind(8).draft([FixedDrafter(first), later], [], 8)
    assert later.asked == []


@pytest.mark.parametrize(
    ("accepted", "limit"),
    [
        ([], 7),
        ([0], 1),
        ([0, 0, 2], 1),
        ([1], 2),
        ([1, 2, 2], 2),
        ([2], 7),
        ([2, None, None], 7),  # steps without drafts do not count
        ([0, 3, 3], 7),
        ([0, 0, 0, 2, 2, 2], 7),  # only the last three count
        ([7, 7, 7, 0, 0, 0], 1),
    ],
)
def test_adaptive_shortens_its_block_after_low_acceptance(accepted: list[int | None], limit: int):
    seen = [outcome(0, 0) if count is None else outcome(7, count) for count in accepted]
    assert after(Adaptive(8), seen).draft_length() == limit


def best_block(alpha: float, a: float, b: float, longest: int) -> int:
    """The definition: (ea + 1) / (a + b g), ea summed token by token."""
    rates = {
        g: (sum(alpha**i for i in range(1, g)) + 1) / (a + b * g) for g in range(2, longest + 1)
    }
    return max(rates, key=rates.__getitem__)


@pytest.mark.parametrize("accepted", range(11))
def test_kelly_takes_the_block_with_the_best_expected_rate(accepted: int):
    # Times on a line of 10 ms and 2 ms a row.
    seen = [outcome(10, accepted, 0.010 + 0.002 * 11), outcome(0, 0, 0.010 + 0.002)]
    assert after(Kelly(16), seen).draft_length() == best_block(accepted / 10, 0.010, 0.002, 16) - 1


def test_kelly_starts_from_published_constants_and_forgets_old_steps():
    assert Kelly(16).draft_length() == best_block(0.5, 0.0470, 0.0087, 16) - 1
    # One block size does not determine a line.
    assert after(Kelly(16), [outcome(4, 2, 5.0)] * 3).draft_length() == Kelly(16).draft_length()
    poor, good = [outcome(4, 0)] * 20, [outcome(4, 4)] * 8
    assert after(Kelly(16), poor + good).draft_length() == after(Kelly(16), good).draft_length()
    assert after(Kelly(16), poor + good).draft_length() > after(Kelly(16), poor).draft_length()


tables = st.dictionaries(
    st.integers(1, 40), st.floats(1e-4, 10, allow_nan=False), min_size=1, max_size=8
).map(CostTable)


def test_costs_are_interpolated_and_extrapolated_linearly():
    cost = CostTable({2: 1.0, 4: 2.0, 8: 3.0})
    assert (cost(2), cost(3), cost(4)) == (1.0, 1.5, 2.0)
    assert cost(6) == 2.5
    assert cost(12) == 4.0  # as from 4 to 8
    assert cost(1) == 1.0  # fewer rows were not measured to be cheaper


def test_costs_grow_linearly_with_the_context():
    cost = CostTable({1: 1.0, 4: 2.0}, context=100, per_token={1: 0.01, 4: 0.02})
    assert [cost.at_context(100)(rows) for rows in (1, 4)] == [1.0, 2.0]
    assert [cost.at_context(200)(rows) for rows in (1, 2, 4)] == pytest.approx([2.0, 8 / 3, 4.0])
    assert cost.at_context(50)(4) == pytest.approx(1.0)
    # A call takes time even where the line would be at 0.
    assert cost.at_context(0)(4) > 0
    assert CostTable({1: 1.0}, context=100).at_context(9000)(1) == 1.0


@given(cost=tables)
def test_one_more_row_never_lowers_the_cost(cost: CostTable):
    costs = [cost(rows) for rows in range(1, 60)]
    assert all(b >= a - 1e-9 for a, b in pairwise(costs))
    assert min(costs) > 0


@pytest.mark.parametrize(
    ("values", "value"),
    [
        (({},), "T"),
        (({0: 0.1},), "0 rows is 0.1"),
        (({1: 0.0},), "1 rows is 0.0"),
        (({1: 0.1, 2: -1.0},), "2 rows is -1.0"),
        (({1: math.nan},), "1 rows is nan"),
        (({1: 1.0, 4: 2.0}, 100, {1: 0.01}), "per_token"),
    ],
)
def test_an_invalid_cost_table_is_rejected(values: tuple[Any, ...], value: str):
    with raises(ValueError, value):
        CostTable(*values)


def test_the_speed_up_at_break_even_is_one():
    # c(2) = 1.5 c(1): 1 + p = 1.5. c(3) = 1.75 c(1): 1 + p + p^2 = 1.75.
    for rows, seconds in ((2, 1.5), (3, 1.75)):
        cost = CostTable({1: 1.0, rows: seconds})
        assert cost.break_even(rows) == pytest.approx(0.5)
        assert cost.speed_up(rows, 0.5) == pytest.approx(1)


def test_there_is_no_break_even_if_certain_drafts_are_still_slower():
    cost = CostTable({1: 0.112, 4: 0.499})
    assert cost.break_even(4) is None
    assert cost.speed_up(4, 1.0) < 1
    assert cost.best(1.0) == (1, 1.0)


def test_the_best_draft_length_grows_with_the_acceptance_probability():
    cost = CostTable({1: 0.01, 2: 0.012, 4: 0.015, 8: 0.025})
    by_chance = [cost.best(chance) for chance in (0.1, 0.3, 0.5, 0.7, 0.9, 1)]
    lengths, gains = zip(*by_chance, strict=True)
    assert (lengths, gains) == (tuple(sorted(lengths)), tuple(sorted(gains)))
    assert (lengths[0], lengths[-1], gains[0]) == (1, 8, 1)
