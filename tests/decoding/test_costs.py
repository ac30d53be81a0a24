import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.costs import CostTable, break_even, expected_tokens, speed_up
from support.errors import raises

tables = st.dictionaries(
    st.integers(1, 40), st.floats(1e-4, 10, allow_nan=False), min_size=1, max_size=8
).map(CostTable)

ZAYA = CostTable({1: 0.112, 4: 0.499})
"""The seed experiment's measurements."""


def test_costs_between_and_beyond_measurements_are_linear():
    cost = CostTable({2: 1.0, 4: 2.0, 8: 3.0})
    assert (cost(2), cost(3), cost(4)) == (1.0, 1.5, 2.0)
    assert cost(6) == 2.5
    assert cost(12) == 4.0  # as from 4 to 8
    assert cost(1) == 1.0  # fewer rows were not measured to be cheaper


def test_costs_grow_by_per_token_seconds_with_the_context():
    cost = CostTable({1: 1.0, 4: 2.0}, context=100, per_token={1: 0.01, 4: 0.02})
    assert [cost.at_context(100)(rows) for rows in (1, 4)] == [1.0, 2.0]
    assert [cost.at_context(200)(rows) for rows in (1, 2, 4)] == pytest.approx([2.0, 8 / 3, 4.0])
    assert cost.at_context(50)(4) == pytest.approx(1.0)
    # A call takes time even where the line would be at 0.
    assert cost.at_context(0)(4) > 0
    assert CostTable({1: 1.0}, context=100).at_context(9000)(1) == 1.0


def test_context_costs_must_be_given_for_all_rows_or_none():
    with raises(ValueError, "per_token"):
        CostTable({1: 1.0, 4: 2.0}, 100, {1: 0.01})


@given(cost=tables)
def test_one_more_row_never_lowers_the_cost(cost: CostTable):
    costs = [cost(rows) for rows in range(1, 60)]
    assert all(b >= a - 1e-9 for a, b in pairwise(costs))
    assert min(costs) > 0


@pytest.mark.parametrize(
    ("seconds", "value"),
    [
        ({}, "T"),
        ({0: 0.1}, "0 rows is 0.1"),
        ({1: 0.0}, "1 rows is 0.0"),
        ({1: 0.1, 2: -1.0}, "2 rows is -1.0"),
        ({1: math.nan}, "1 rows is nan"),
    ],
)
def test_an_impossible_cost_table_is_rejected(seconds: dict[int, float], value: str):
    with raises(ValueError, value):
        CostTable(seconds)


def test_expected_tokens_are_the_bonus_token_and_the_accepted_ones():
    assert expected_tokens([]) == 1
    assert expected_tokens([0.5]) == 1.5
    assert expected_tokens([0.5, 0.5, 1.0]) == 1 + 0.5 + 0.25 + 0.25
    assert expected_tokens([1.0] * 7) == 8
    assert expected_tokens([0.0, 1.0]) == 1


def test_no_acceptance_rate_breaks_even_on_zaya_at_four_rows():
    # Four tokens one by one take 4 * 112 = 448 ms, and the block that might hold them 499 ms.
    assert break_even(ZAYA, 4) is None
    assert speed_up(ZAYA, [1.0] * 3) == pytest.approx(448 / 499)


def test_break_even_matches_values_worked_out_by_hand():
    # c(2) = 1.5 c(1): 1 + p = 1.5.
    assert break_even(CostTable({1: 1.0, 2: 1.5}), 2) == pytest.approx(0.5)
    # c(3) = 1.75 c(1): 1 + p + p^2 = 1.75.
    assert break_even(CostTable({1: 1.0, 3: 1.75}), 3) == pytest.approx(0.5)
    # Free rows pay at any acceptance rate.
    assert break_even(CostTable({1: 1.0, 8: 1.0}), 8) == pytest.approx(0, abs=1e-9)
    # Rows as expensive as their tokens pay only if every draft token is accepted.
    assert break_even(CostTable({1: 1.0, 4: 4.0}), 4) == pytest.approx(1.0)


@given(cost=tables, rows=st.integers(2, 16))
def test_speculation_pays_above_break_even_and_not_below(cost: CostTable, rows: int):
    p = break_even(cost, rows)
    if p is None:
        assert speed_up(cost, [1.0] * (rows - 1)) < 1
    else:
        assert speed_up(cost, [min(p + 1e-6, 1.0)] * (rows - 1)) >= 1
        assert p < 1e-6 or speed_up(cost, [p - 1e-6] * (rows - 1)) < 1
