import random

import pytest

from paceline.decoding.costs import CostTable
from paceline.runtime.batching.batch import BatchCost

ALONE = CostTable({1: 1.0, 8: 1.0, 9: 4.1, 32: 4.1})
"""Steps: on the whole a row adds 0.1."""


def share_of_a_row(cost: BatchCost, sequences: int) -> float:
    """Share of a call of one row each that one more row adds: all that decisions depend on."""
    return cost.row / cost(sequences, sequences)


def test_costs_start_as_those_of_one_sequence():
    cost = BatchCost(ALONE)
    assert cost.row == pytest.approx(0.1)
    assert cost(1, 1) == pytest.approx(1.0)
    assert 2.0 <= cost(4, 11) < 2.2


def test_costs_are_learnt_from_calls_of_any_rows():
    cost, drawn = BatchCost(ALONE), random.Random(1)
    for _ in range(400):
        count, rows = drawn.randint(2, 8), drawn.randint(8, 40)
        noise = drawn.choice((0.8, 1.0, 1.2))
        cost.learn(count, rows, noise * (0.9 + 0.5 * (count - 1) + 0.1 * rows))
    assert cost(4, 11) == pytest.approx(0.9 + 3 * 0.5 + 1.1, rel=0.1)
    assert 0.09 < cost.row < 0.16  # what is not certain counts against drafts
    for _ in range(400):  # texts have become longer
        cost.learn(4, 11, 6.0)
    assert cost(4, 11) == pytest.approx(6.0, rel=0.05)


@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_prefills_and_other_programs_leave_the_share_of_a_row_as_it_is(slow: float):
    """A row that seems to cost nothing is drafted, and slows down everybody's answer."""
    cost, noise = BatchCost(ALONE), random.Random(1)
    cost.learn(32, 512, 3 * slow * (0.9 + 0.1 * 512))  # the first call, which compiles
    for _ in range(20):
        cost.learn(32, 32, noise.uniform(0.7, 1.3) * slow * (0.9 + 0.1 * 32))
    assert share_of_a_row(cost, 32) == pytest.approx(0.1 / 4.1, rel=0.3)


@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_sequences_that_run_one_after_another_leave_the_share_of_a_row_as_it_is(slow: float):
    cost, noise = BatchCost(ALONE, shared=False), random.Random(1)
    for _ in range(100):  # as many rows as sequences: the profile alone says what a row costs
        cost.learn(32, 32, noise.uniform(0.9, 1.1) * slow * 32 * ALONE(1))
    assert share_of_a_row(cost, 32) == pytest.approx(0.1 / 32, rel=0.2)


@pytest.mark.parametrize("seconds", [{1: 2.0}, {1: 2.0, 32: 2.0}])
def test_the_cost_of_a_row_is_positive(seconds: dict[int, float]):
    assert BatchCost(CostTable(seconds)).row > 0


def test_learnt_costs_are_never_negative():
    cost = BatchCost(ALONE)
    for rows, seconds in ((30, 1e-9), (2, 9.0), (30, 1e-9)):
        cost.learn(2, rows, seconds)
        assert cost.row > 0
        assert cost(2, 2) >= cost(2, 1) > 0
