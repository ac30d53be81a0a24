import pytest

from paceline.decoding.costs import CostTable
from paceline.plan import best, best_by_chance, break_even, plan_rows, speed_up
from paceline_lab.simulate.costs import ZAYA

FLAT = CostTable({1: 0.01, 2: 0.01, 4: 0.01})  # more rows for nothing
DEAR = CostTable({1: 0.01, 2: 0.02, 4: 0.04})  # more rows at full price


def test_there_is_a_row_for_every_measured_length_but_plain():
    free, dear = plan_rows(FLAT), plan_rows(DEAR)
    assert [(row["rows"], row["milliseconds"], row["ratio"]) for row in free] == [
        (2, 10, 1),
        (4, 10, 1),
    ]
    for row in free:  # any chance pays, and certainty brings all rows
        assert row["break_even"] == pytest.approx(0, abs=1e-9)
        assert row["speed_up"]["1.0"] == pytest.approx(row["rows"])
        gains = [*row["speed_up"].values()]
        assert gains == sorted(gains)
    for row in dear:  # only certainty breaks even
        assert row["break_even"] == pytest.approx(1)
        assert row["speed_up"]["0.5"] < 1


def test_break_even_is_where_the_speed_up_is_one():
    # c(2) = 1.5 c(1): 1 + p = 1.5. c(3) = 1.75 c(1): 1 + p + p^2 = 1.75.
    for rows, seconds in ((2, 1.5), (3, 1.75)):
        cost = CostTable({1: 1.0, rows: seconds})
        assert break_even(cost, rows) == pytest.approx(0.5)
        assert speed_up(cost, rows, 0.5) == pytest.approx(1)


def test_where_even_certainty_does_not_pay_it_says_never():
    # Four rows cost the ZAYA experiment more than four calls.
    (row,) = plan_rows(CostTable(ZAYA))
    assert row["break_even"] is None
    assert row["speed_up"]["1.0"] < 1
    assert best(CostTable(ZAYA), 1.0) == (1, 1.0)


def test_the_best_length_grows_with_the_chance():
    by_chance = best_by_chance(CostTable({1: 0.01, 2: 0.012, 4: 0.015, 8: 0.025}))
    lengths = [rows for rows, _ in by_chance.values()]
    gains = [gain for _, gain in by_chance.values()]
    assert (lengths, gains) == (sorted(lengths), sorted(gains))
    assert (lengths[0], lengths[-1], gains[0]) == (1, 8, 1)
