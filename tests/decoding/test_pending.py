"""Tokens that are still being computed: what may be done with them before they are waited for."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.generation import Generation
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Drafter, Pending, Proposal
from support.driver import answer, decode
from support.toy import ToyEngine


class Device:
    """Computes values when they are waited for, and counts how often that is."""

    def __init__(self, values: Sequence[int]) -> None:
        self.waits = 0
        self._values = values

    def read(self) -> Sequence[int]:
        self.waits += 1
        return self._values


def test_how_many_there_are_is_known():
    device = Device([4, 5, 6, 7])
    pending = Pending(device.read, 3, "array")
    assert len(pending) == 3
    assert len(pending[:2]) == 2
    assert len(pending[:9]) == 3
    assert len(pending.after(1)) == 4
    assert len(pending[:0]) == 0
    assert bool(pending)
    assert not pending[:0]
    assert device.waits == 0


def test_who_looks_waits_for_all():
    device = Device([4, 5, 6, 7])
    pending = Pending(device.read, 3)
    assert list(pending) == [4, 5, 6]
    assert (pending[0], pending[-1]) == (4, 6)
    assert pending[1:] == [5, 6]
    with pytest.raises(IndexError):
        pending[3]
    assert device.waits == 1


def test_the_beginning_is_pending_and_what_stands_before_is_not():
    device = Device([4, 5, 6])
    block = Pending(device.read, 3, "array").after(9)
    assert block[:1] == [9]
    assert block[:0] == []
    beginning = block[:3]
    assert isinstance(beginning, Pending)
    assert (beginning.array, beginning.before, len(beginning)) == ("array", [9], 3)
    assert device.waits == 0
    assert list(beginning) == [9, 4, 5]


slices = st.slices(6)


@given(before=st.lists(st.integers(0, 9), max_size=3), length=st.integers(0, 4), at=slices)
def test_it_is_cut_as_any_sequence_is(before: list[int], length: int, at: slice):
    values = [10, 11, 12, 13]
    pending = Pending(lambda: values, length, None, before)
    assert list(pending[at]) == [*before, *values[:length]][at]


class Late(Drafter):
    """Proposes three tokens that are still being computed."""

    name = "late"

    def __init__(self) -> None:
        self.device = Device([1, 2, 3])

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        tokens = Pending(self.device.read, 3)
        return Proposal(tokens, self.name, 0, Pending(lambda: [0.5] * 3, 3)).cut(limit)


def test_a_block_is_made_of_them_without_waiting():
    drafter, engine = Late(), ToyEngine()
    generation = Generation(
        [5, 6, 7],
        vocab_size=engine.vocab_size,
        context_length=engine.context_length,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=9),
        drafters=[drafter],
        policy=Fixed(3),
        decode=decode,
    )
    sequence = engine.open()
    generation.accept(engine.step([(sequence, generation.next_block())]).logits[0])
    block = generation.next_block()
    assert isinstance(block.tokens, Pending)
    assert (len(block.tokens), block.rows) == (3, 3)
    assert drafter.device.waits == 0
    assert list(block.tokens) == [generation.tokens[-1], 1, 2]


@pytest.mark.parametrize("engine", [ToyEngine(), ToyEngine(min_rows=2, best=True)])
def test_an_engine_that_knows_nothing_of_them_runs_them(engine: ToyEngine):
    stopping = Stopping(max_tokens=9)
    expected = answer(engine, [5, 6, 7], stopping=stopping)
    assert answer(engine, [5, 6, 7], stopping=stopping, drafters=[Late()]) == expected
