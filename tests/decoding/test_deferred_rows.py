"""Pending values, which do not wait for the device, and common prefixes."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.generation import Generation, Rules, Speculation, Target
from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import DeferredRows, Drafter, Proposal, common_prefix_length
from support.driver import answer, decode
from support.toy import ToyEngine


class Device:
    """Computes values when they are read, and counts the reads."""

    def __init__(self, values: Sequence[int]) -> None:
        self.waits = 0
        self._values = values

    def read(self) -> Sequence[int]:
        self.waits += 1
        return self._values


def test_the_number_of_pending_values_needs_no_wait_but_reading_one_does():
    device = Device([4, 5, 6, 7])
    pending = DeferredRows(device.read, 3, "array")
    assert len(pending) == 3
    assert len(pending[:2]) == 2
    assert len(pending[:9]) == 3
    assert pending[:2].array == pending.after(1)[:3].array == "array"  # type: ignore[attr-defined]
    assert len(pending.after(1)) == 4
    assert len(pending[:0]) == 0
    assert bool(pending)
    assert not pending[:0]
    assert device.waits == 0
    assert list(pending) == [4, 5, 6]
    assert (pending[0], pending[-1]) == (4, 6)
    assert pending[1:] == [5, 6]
    with pytest.raises(IndexError):
        pending[3]
    assert device.waits == 1


slices = st.slices(6)


@given(before=st.lists(st.integers(0, 9), max_size=3), length=st.integers(0, 4), at=slices)
def test_pending_values_are_sliced_like_any_sequence(before: list[int], length: int, at: slice):
    values = [10, 11, 12, 13]
    pending = DeferredRows(lambda: values, length, None, before)
    assert list(pending[at]) == [*before, *values[:length]][at]


class Late(Drafter):
    name = "late"

    def __init__(self) -> None:
        self.device = Device([1, 2, 3])

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        tokens = DeferredRows(self.device.read, 3)
        return Proposal(tokens, self.name, 0, DeferredRows(lambda: [0.5] * 3, 3)).cut(limit)


def test_a_block_of_pending_tokens_is_built_without_waiting():
    drafter, engine = Late(), ToyEngine()
    generation = Generation(
        [5, 6, 7],
        Target(engine.vocab_size, engine.context_length, decode),
        Rules(stopping=Stopping(max_tokens=9)),
        Speculation(Fixed(3), [drafter]),
    )
    sequence = engine.open()
    generation.accept(engine.step([(sequence, generation.next_block())]).logits[0])
    block = generation.next_block()
    assert isinstance(block.tokens, DeferredRows)
    assert (len(block.tokens), block.rows) == (3, 3)
    assert drafter.device.waits == 0
    assert list(block.tokens) == [generation.tokens[-1], 1, 2]


@pytest.mark.parametrize("engine", [ToyEngine(), ToyEngine(min_rows=2, best=True)])
def test_an_engine_without_support_runs_pending_tokens(engine: ToyEngine):
    stopping = Stopping(max_tokens=9)
    expected = answer(engine, [5, 6, 7], stopping=stopping)
    assert answer(engine, [5, 6, 7], stopping=stopping, drafters=[Late()]) == expected


texts = st.lists(st.integers(0, 1), max_size=8)


@pytest.mark.parametrize("kind", [list, np.array])
@given(one=texts, other=texts)
def test_common_prefix_length_is_the_length_of_the_longest_equal_prefix(
    kind: type, one: list[int], other: list[int]
):
    equal = [n for n in range(min(len(one), len(other)) + 1) if one[:n] == other[:n]]
    assert common_prefix_length(kind(one), kind(other)) == max(equal)
