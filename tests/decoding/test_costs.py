import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.costs import CostTable
from support.errors import raises

tables = st.dictionaries(
    st.integers(1, 40), st.floats(1e-4, 10, allow_nan=False), min_size=1, max_size=8
).map(CostTable)


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


def test_break_even_is_where_the_speed_up_is_one():
    # c(2) = 1.5 c(1): 1 + p = 1.5. c(3) = 1.75 c(1): 1 + p + p^2 = 1.75.
    for rows, seconds in ((2, 1.5), (3, 1.75)):
        cost = CostTable({1: 1.0, rows: seconds})
        assert cost.break_even(rows) == pytest.approx(0.5)
        assert cost.speed_up(rows, 0.5) == pytest.approx(1)


def test_where_even_certainty_does_not_pay_there_is_no_break_even():
    cost = CostTable({1: 0.112, 4: 0.499})
    assert cost.break_even(4) is None
    assert cost.speed_up(4, 1.0) < 1
    assert cost.best(1.0) == (1, 1.0)


def test_the_best_length_grows_with_the_chance():
    cost = CostTable({1: 0.01, 2: 0.012, 4: 0.015, 8: 0.025})
    by_chance = [cost.best(chance) for chance in (0.1, 0.3, 0.5, 0.7, 0.9, 1)]
    lengths, gains = zip(*by_chance, strict=True)
    assert (lengths, gains) == (tuple(sorted(lengths)), tuple(sorted(gains)))
    assert (lengths[0], lengths[-1], gains[0]) == (1, 8, 1)
