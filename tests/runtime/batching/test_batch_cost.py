import random

import pytest

from paceline.decoding.costs import CostTable
from paceline.runtime.batching.batch import BatchCost

ALONE = CostTable({1: 1.0, 8: 1.0, 9: 4.1, 32: 4.1})
"""Steps: on the whole a row adds 0.1."""


def test_the_cost_of_a_sequence_starts_at_zero():
    cost = BatchCost(ALONE)
    assert cost.row == pytest.approx(0.1)
    assert cost(1, 1) == pytest.approx(1.0)
    assert cost(4, 11) == pytest.approx(2.0)


def test_the_cost_of_a_sequence_is_learnt_from_calls_of_any_rows():
    cost, drawn = BatchCost(ALONE), random.Random(1)
    for _ in range(400):
        count, rows = drawn.randint(2, 8), drawn.randint(8, 40)
        noise = drawn.choice((0.8, 1.0, 1.2))
        cost.learn(count, rows, 0.9 + noise * 0.5 * count + 0.1 * rows)
    assert cost(4, 11) == pytest.approx(0.9 + 4 * 0.5 + 1.1, rel=0.05)
    for _ in range(400):  # texts have become longer
        cost.learn(4, 11, 6.0)
    assert cost(4, 11) == pytest.approx(6.0, rel=0.01)


@pytest.mark.parametrize("seconds", [{1: 2.0}, {1: 2.0, 32: 2.0}])
def test_the_cost_of_a_row_is_positive(seconds: dict[int, float]):
    assert BatchCost(CostTable(seconds)).row > 0


def test_learnt_costs_are_never_negative():
    cost = BatchCost(ALONE)
    cost.learn(2, 30, 0.1)
    assert cost(2, 1) == pytest.approx(1.0)
