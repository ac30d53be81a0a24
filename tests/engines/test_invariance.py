"""What `exact` rests on: engines that break one condition each, and small caches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines.base import StepResult
from paceline.engines.invariance import (
    BATCH,
    BLOCK_LENGTH,
    CHUNKED_PREFILL,
    CONDITIONS,
    PREFIX_CACHE,
    Compared,
    compare,
    measure_invariance,
)
from paceline.runtime.exactness import Exactness
from support.toy import ToyEngine


class Batched(ToyEngine):
    """Rows are off where the call has another sequence."""

    def step(self, work: Any) -> StepResult:
        result = super().step(work)
        if len(work) > 1:
            for logits in result.logits:
                logits[:, 0] += np.float32(1e-4)
        return result


class Marked(ToyEngine):
    """Keys of a block's slots are those of others, by what `mark` says of the block."""

    def step(self, work: Any) -> StepResult:
        self._marks = {id(table): self.mark(block) for table, block in work}
        return super().step(work)

    def _write(self, table: Any, tokens: list[int]) -> None:
        super()._write(table, tokens)
        slots = self._slots(table, table.length + len(tokens))
        new = tuple(slot[table.length :] for slot in slots)
        self._keys[new] ^= np.uint64(self._marks[id(table)]) << np.uint64(50)

    def mark(self, block: Block) -> int:
        raise NotImplementedError


class Cut(Marked):
    """Keys of a prompt depend on the rows of the call that reads them."""

    def mark(self, block: Block) -> int:
        return len(block.tokens) if block.prefill else 0


class Short(Marked):
    """Keys of a prompt are others where a call reads two to eight rows of it, as on a GPU."""

    def mark(self, block: Block) -> int:
        return int(block.prefill and 2 <= len(block.tokens) <= 8)


class Answering(Marked):
    """Keys of an answer are not those of a prompt with the same tokens, and are shared anyway."""

    def mark(self, block: Block) -> int:
        return 0 if block.prefill else 1


@pytest.mark.parametrize("min_rows", [1, 2])
def test_every_condition_holds_for_an_engine_that_keeps_its_rules(min_rows: int):
    result = measure_invariance(ToyEngine(min_rows=min_rows))
    assert result.keys() == {*CONDITIONS}
    assert all(item.holds and item.rows > 3 for item in result.values())


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Batched, {BATCH}),
        (Cut, {CHUNKED_PREFILL, PREFIX_CACHE}),
        (Short, {CHUNKED_PREFILL, PREFIX_CACHE}),
        (Answering, {PREFIX_CACHE}),
    ],
)
def test_the_condition_that_an_engine_breaks_is_named(kind: type[ToyEngine], broken: set[str]):
    result = measure_invariance(kind(block_size=4))
    assert {name for name, value in result.items() if not value.holds} == broken
    assert result[BLOCK_LENGTH].holds


@pytest.mark.parametrize("cache_blocks", range(1, 9))
@pytest.mark.parametrize("kind", [ToyEngine, Batched, Cut])
def test_a_small_cache_is_never_overfilled(kind: type[ToyEngine], cache_blocks: int):
    engine = kind(cache_blocks=cache_blocks, block_size=16, context_length=2048)
    free = engine.free_slots
    invariance = measure_invariance(engine)
    assert engine.free_slots == free
    alone = cache_blocks < 2
    assert invariance.keys() == ({BLOCK_LENGTH, CHUNKED_PREFILL} if alone else {*CONDITIONS})


def test_slots_that_others_hold_are_left_to_them():
    engine = ToyEngine(cache_blocks=8, block_size=8)
    with_others = engine.open()
    engine.step([(with_others, Block(list(range(40)), 1, prefill=True))])
    with_others.commit(40)
    row = engine.step([(with_others, Block([1], 1))]).logits[0].copy()
    measure_invariance(engine)
    assert engine.step([(with_others, Block([1], 1))]).logits[0].tobytes() == row.tobytes()
    with_others.close()
    assert engine.free_slots == 64


def test_a_context_too_short_for_any_text_is_not_measured():
    assert measure_invariance(ToyEngine(context_length=8)) == {}


def test_a_condition_without_room_is_measured_when_there_is_room(tmp_path: Path):
    small = ToyEngine(cache_blocks=1, block_size=64)
    assert Exactness(small, "m", tmp_path).compared().keys() == {BLOCK_LENGTH, CHUNKED_PREFILL}
    large = ToyEngine()
    assert large.describe() == small.describe()
    assert Exactness(large, "m", tmp_path).compared().keys() == {*CONDITIONS}
    steps = large.steps
    assert Exactness(large, "m", tmp_path).compared().keys() == {*CONDITIONS}
    assert large.steps == steps, "what was measured is kept"


def test_a_comparison_counts_bits_picks_and_rates():
    expected = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], np.float32)
    values = np.array([[0.0, 1.0], [-0.0, 1.0], [0.0, 1.5], [2.0, 1.0]], np.float32)
    compared = compare(values, expected)
    assert compared == Compared(4, 3, 1, 2.0)
    assert compared.as_dict() == {
        "holds": False,
        "rows": 4,
        "differing": 3,
        "differing_rate": 0.75,
        "other_picks": 1,
        "other_picks_rate": 0.25,
        "largest_difference": 2.0,
    }
    assert not Compared().holds, "nothing was compared"
    assert (compared + Compared(1)).rows == 5
