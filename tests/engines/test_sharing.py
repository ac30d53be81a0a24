import pytest

from paceline.decoding.costs import CostTable, SharedCost
from paceline.engines.base import StepResult
from paceline.engines.sharing import shared_cost
from paceline.errors import CacheFull
from support.toy import ToyEngine

ALONE = CostTable({1: 1.0, 8: 1.7, 32: 4.1})


class Timed(ToyEngine):
    """Takes 5 seconds a call, 2 a sequence and 0.5 a row."""

    def step(self, work: list) -> StepResult:
        rows = sum(len(block.tokens) for _, block in work)
        return super().step(work)._replace(seconds=5 + 2 * len(work) + 0.5 * rows)


class Odd(ToyEngine):
    """The more there is to do the sooner it is done."""

    def step(self, work: list) -> StepResult:
        rows = sum(len(block.tokens) for _, block in work)
        return super().step(work)._replace(seconds=100 - 3 * len(work) - rows)


class Failing(ToyEngine):
    """Has no room for the blocks of six sequences."""

    def step(self, work: list) -> StepResult:
        if len(work) == 6:
            raise CacheFull("no room")
        return super().step(work)


def test_what_a_call_a_sequence_and_a_row_take_is_found():
    found = shared_cost(Timed(context_length=512), ALONE)
    assert tuple(found) == pytest.approx((5, 2, 0.5))
    assert found(3, 10) == pytest.approx(5 + 3 * 2 + 10 * 0.5)


def test_without_room_for_several_a_row_costs_what_it_costs_alone():
    found = shared_cost(Timed(context_length=512, cache_blocks=8), ALONE)
    assert found == SharedCost(pytest.approx(0.9), 0.0, pytest.approx(0.1))
    assert found(1, 1) == pytest.approx(ALONE(1))


def test_nothing_makes_a_call_cheaper():
    found = shared_cost(Odd(context_length=512), ALONE)
    assert found.sequence == 0
    assert found.row == pytest.approx(ALONE.row)


@pytest.mark.parametrize("kind", [Timed, Failing])
def test_no_slots_are_left_behind(kind: type[ToyEngine]):
    engine = kind(context_length=512)
    free = engine.free_slots
    try:
        shared_cost(engine, ALONE)
    except CacheFull:
        assert kind is Failing
    assert engine.free_slots == free
