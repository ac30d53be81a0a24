"""Stored rules for rows, and comparisons of rows on engines that break one rule."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines.base import StepResult
from paceline.engines.exact import (
    BATCH,
    BLOCK_LENGTH,
    CHUNKED_PREFILL,
    CONDITIONS,
    PREFIX_CACHE,
    RowComparison,
    compare,
    measure_invariance,
    rows_hold,
    together_holds,
)
from paceline.engines.rows import RowRange, RowRules, load_rules, save_rules
from paceline.runtime.exactness import Exactness
from support.toy import ToyEngine


def test_stored_rules_match_the_verified_ones_and_a_corrupt_file_is_ignored(tmp_path: Path):
    path = tmp_path / "folder" / "model.rows"
    assert load_rules(path) is None
    save_rules(path, rules := RowRules(RowRange(2, 16), RowRange(64, 256), True, 7))
    assert load_rules(path) == rules
    for text in ("", "{}", "[]", '{"decode": 1, "prefill": [1, 2], "single": true}'):
        path.write_text(text)
        assert load_rules(path) is None


CUTS = (1024, 1025, 16384)


@pytest.mark.parametrize(
    ("rows", "count", "position", "lengths"),
    [
        (RowRange(1, 32), 1, 0, [1]),
        (RowRange(2, 4), 9, 100, [4, 4, 1]),
        (RowRange(8, 8), 0, 0, []),
        (RowRange(1, 8), 8, 1018, [5, 1, 2]),
        (RowRange(2, 8), 8, 1018, [4, 1, 3]),
        (RowRange(8, 8), 8, 1016, [1, 7]),
        (RowRange(2, 8), 8, 1014, [8]),
        (RowRange(2, 8), 8, 1023, [8]),
        (RowRange(2, 8), 4, 16380, [2, 2]),
    ],
)
def test_a_block_is_split_into_passes_of_valid_size_at_the_cuts(
    rows: RowRange, count: int, position: int, lengths: list[int]
):
    parts = [list(range(count))[part] for part in rows.split(count, position, CUTS)]
    assert [len(part) for part in parts] == lengths
    assert [row for part in parts for row in part] == list(range(count))


# -- comparisons of an engine's rows ---------------------------------------------------------------


class Batched(ToyEngine):
    def step(self, work: Any) -> StepResult:
        result = super().step(work)
        if len(work) > 1:
            for logits in result.logits:
                logits[:, 0] += np.float32(1e-4)
        return result


class Marked(ToyEngine):
    """The keys of a block's slots vary with `mark` of the block."""

    def step(self, work: Any) -> StepResult:
        self._marks = {id(table): self.mark(block) for table, block in work}
        return super().step(work)

    def _write(self, table: Any, tokens: list[int]) -> None:
        super()._write(table, tokens)
        new = slice(table.length, table.length + len(tokens))
        table.keys[new] ^= np.uint64(self._marks[id(table)]) << np.uint64(50)

    def mark(self, block: Block) -> int:
        raise NotImplementedError


class Blocks(Marked):
    """Output keys depend on the rows of the pass, which only shows in rows after the block."""

    def mark(self, block: Block) -> int:
        return 0 if block.prefill else int(len(block.tokens) in (2, 5))


class Cut(Marked):
    """Prompt keys depend on the rows of their pass."""

    def mark(self, block: Block) -> int:
        return len(block.tokens) if block.prefill else 0


class Short(Marked):
    """Prompt keys differ in passes of two to eight rows, as on a GPU."""

    def mark(self, block: Block) -> int:
        return int(block.prefill and 2 <= len(block.tokens) <= 8)


class Answering(Marked):
    """Output keys differ from prompt keys of the same tokens, and are shared anyway."""

    def mark(self, block: Block) -> int:
        return 0 if block.prefill else 1


@pytest.mark.parametrize("min_rows", [1, 2])
def test_every_exactness_condition_holds_for_a_correct_engine(min_rows: int):
    result = measure_invariance(ToyEngine(min_rows=min_rows))
    assert result.keys() == {*CONDITIONS}
    assert all(item.holds and item.rows > 3 for item in result.values())
    assert rows_hold(ToyEngine(block_size=4), (40, 90))


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Blocks, {BLOCK_LENGTH, BATCH}),
        (Batched, {BATCH}),
        (Cut, {CHUNKED_PREFILL, PREFIX_CACHE}),
        (Short, {CHUNKED_PREFILL, PREFIX_CACHE}),
        (Answering, {PREFIX_CACHE}),
    ],
)
def test_a_violated_exactness_condition_is_reported(kind: type[ToyEngine], broken: set[str]):
    result = measure_invariance(kind(block_size=4))
    assert {name for name, value in result.items() if not value.holds} == broken
    assert rows_hold(kind(block_size=4), (40, 90)) is (broken == {BATCH})


def test_row_rules_are_verified_at_every_context_length_that_fits():
    class Late(Marked):
        def mark(self, block: Block) -> int:
            return int(block.tokens[0] == self.late and len(block.tokens) == 1)

    engine = Late()
    engine.late = -1
    assert rows_hold(engine, (40, 60, 90))
    tokens = np.random.default_rng(1).integers(0, engine.vocab_size, 90 + 16 + 5).tolist()
    engine.late = tokens[90]
    assert not rows_hold(engine, (40, 60, 90))
    assert not rows_hold(ToyEngine(context_length=40), (40, 60, 90)), "nothing was compared"


def test_sequences_share_forward_passes_if_rows_stay_bit_identical():
    assert together_holds(ToyEngine())
    assert not together_holds(Batched())


@pytest.mark.parametrize("cache_blocks", [1, 2, 8])
@pytest.mark.parametrize("kind", [ToyEngine, Cut])
def test_measuring_never_overfills_a_small_cache(kind: type[ToyEngine], cache_blocks: int):
    engine = kind(cache_blocks=cache_blocks, block_size=16, context_length=2048)
    free = engine.free_slots
    invariance = measure_invariance(engine)
    assert engine.free_slots == free
    alone = cache_blocks < 2
    assert invariance.keys() == ({BLOCK_LENGTH, CHUNKED_PREFILL} if alone else {*CONDITIONS})


def test_measuring_leaves_used_slots_alone():
    engine = ToyEngine(cache_blocks=8, block_size=8)
    with_others = engine.open()
    engine.step([(with_others, Block(list(range(40)), 1, prefill=True))])
    with_others.commit(40)
    row = engine.step([(with_others, Block([1], 1))]).logits[0].copy()
    measure_invariance(engine)
    assert engine.step([(with_others, Block([1], 1))]).logits[0].tobytes() == row.tobytes()
    with_others.close()
    assert engine.free_slots == 64


def test_too_short_a_context_is_not_measured():
    assert measure_invariance(ToyEngine(context_length=8)) == {}


def test_a_condition_is_measured_once_the_cache_has_room(tmp_path: Path):
    small = ToyEngine(cache_blocks=1, block_size=64)
    assert Exactness(small, "m", tmp_path).comparisons().keys() == {BLOCK_LENGTH, CHUNKED_PREFILL}
    large = ToyEngine()
    assert large.describe() == small.describe()
    assert Exactness(large, "m", tmp_path).comparisons().keys() == {*CONDITIONS}
    steps = large.steps
    assert Exactness(large, "m", tmp_path).comparisons().keys() == {*CONDITIONS}
    assert large.steps == steps, "measurements are saved"


def test_a_comparison_reports_differing_bits_picks_and_rates():
    expected = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], np.float32)
    values = np.array([[0.0, 1.0], [-0.0, 1.0], [0.0, 1.5], [2.0, 1.0]], np.float32)
    compared = compare(values, expected)
    assert compared == RowComparison(4, 3, 1, 2.0)
    assert compared.as_dict() == {
        "holds": False,
        "rows": 4,
        "differing": 3,
        "differing_rate": 0.75,
        "other_picks": 1,
        "other_picks_rate": 0.25,
        "largest_difference": 2.0,
    }
    assert not RowComparison().holds, "nothing was compared"
    assert (compared + RowComparison(1)).rows == 5
