"""Simulated kernels of Apple GPUs: blocks are bit-identical to plain decoding, or have no rules.

Without MLX. Positions are those around each number of keys where a kernel changes, and samples
between; for some models all up to 66,000.
"""

from collections.abc import Callable, Iterator
from itertools import repeat
from random import Random
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Logits
from paceline.engines.rows import RowRange, RowRules
from paceline_mlx import rows as row_rules
from paceline_mlx.rows import max_shared_sequences, measure_rules
from paceline_mlx.thresholds import BACK, MAX_ROWS, THRESHOLDS, drop_step, dropped
from support import metal
from support.metal import CHIPS, Chip, Shape

CONTEXT = 66_100

SHAPES = {
    **{f"gqa {gqa}": Shape(4 * gqa, 4) for gqa in (1, 4, 5, 6, 8, 16)},
    **{f"gqa {gqa}, bf16": Shape(4 * gqa, 4, quantized=False) for gqa in (1, 4)},
    "head 64": Shape(32, 4, head_size=64),
    "head 80": Shape(32, 32, head_size=80),
    "head 512": Shape(16, 2, head_size=512),
    "wide": Shape(32, 8, width=8192),
    **{f"window {size}": Shape(16, 4, window=size) for size in (128, 512, 2047, 4096)},
}

AROUND = [range(keys - 24, keys + 24) for keys in (*THRESHOLDS, 512, 800, 896, 2048, 3000)]


def blocks(seed: int) -> Iterator[tuple[int, int]]:
    random = Random(seed)
    while True:
        count = random.randint(1, 17)
        yield count, random.randint(1, count)


def differing(chip: Chip, shape: Shape, rules: RowRules, where: list[range]) -> list[int]:
    results = []
    for seed, positions in enumerate(where):
        plain = metal.decoded(chip, shape, rules, positions, repeat((1, 1)))
        drafted = metal.decoded(chip, shape, rules, positions, blocks(seed))
        results += [at for at, kernels in plain.items() if drafted[at] != kernels]
    return results


@pytest.mark.parametrize("name", SHAPES)
def test_plain_and_speculative_decoding_use_the_same_kernels_on_every_chip(name: str):
    shape = SHAPES[name]
    for chip in CHIPS:
        rules = metal.chosen(chip, shape, CONTEXT)
        if rules is not None:  # else `exact` is false before the first answer
            assert differing(chip, shape, rules, AROUND) == [], (chip, rules)


@pytest.mark.parametrize("name", ["gqa 8", "window 512"])
def test_plain_and_speculative_decoding_use_the_same_kernels_at_every_position(name: str):
    chip, shape = Chip("s", 17), SHAPES[name]
    rules = metal.chosen(chip, shape, CONTEXT)
    assert rules is not None
    assert differing(chip, shape, rules, [range(16, 66_000)]) == []


@pytest.mark.parametrize("context", [16, 512, 1024, 1050, 4096, 32768])
def test_row_rules_of_a_short_context_hold_up_to_its_end(context: int):
    for letter, gqa in (("g", 1), ("s", 8), ("d", 4)):
        chip, shape = Chip(letter, 15), SHAPES[f"gqa {gqa}"]
        rules = metal.chosen(chip, shape, context)
        assert rules is not None
        where = [range(max(0, near.start), min(near.stop, context)) for near in AROUND]
        assert differing(chip, shape, rules, [near for near in where if near]) == []


def test_common_models_have_row_rules_that_allow_speculation():
    expected = {
        "gqa 4": (2, 8),
        "gqa 5": (2, 6),
        "gqa 6": (2, 5),
        "gqa 8": (2, 4),
        "gqa 16": (2, 2),
    }
    for name, decode in expected.items():
        rules = [metal.chosen(chip, SHAPES[name], CONTEXT) for chip in CHIPS]
        assert None not in rules, name
        assert rules[CHIPS.index(Chip("s", 17))].decode == decode
    assert metal.chosen(Chip("g", 17), SHAPES["gqa 4, bf16"], CONTEXT).decode == (2, 5)


@pytest.mark.parametrize("name", ["gqa 4", "gqa 4, bf16", "wide"])
def test_batched_matmuls_up_to_the_chosen_rows_use_one_kernel(name: str):
    shape = SHAPES[name]
    for chip in CHIPS:
        rows = metal.chosen(chip, shape, 4000).decode
        alone = metal.weights(chip, shape, rows.min_rows)

        def agrees(counts: list[int], chip: Chip = chip, alone: metal.Kernels = alone) -> bool:
            return metal.weights(chip, shape, sum(counts)) == alone

        most = max_shared_sequences(rows, agrees)
        kernels = {metal.weights(chip, shape, total) for total in range(rows.min_rows, most + 1)}
        assert kernels <= {alone}
        if chip.generation == 17 and shape.quantized:
            assert most >= 10


# -- tests that can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["g", "s", "d"])
def test_without_splits_at_thresholds_rows_differ_and_no_rules_are_found(
    letter: str, monkeypatch: pytest.MonkeyPatch
):
    chip, shape = Chip(letter, 17), SHAPES["gqa 4"]
    uncut = [rules._replace(cuts=()) for rules in row_rules.CANDIDATES]
    rules = next(rules for rules in uncut if rules.decode == (2, 8))
    assert differing(chip, shape, rules, AROUND)
    monkeypatch.setattr(row_rules, "CANDIDATES", uncut)
    assert metal.chosen(chip, shape, CONTEXT) is None


def test_the_single_row_kernel_at_8_192_keys_is_found_by_probing_attention():
    chip, shape = Chip("g", 13), SHAPES["gqa 8"]
    rules = metal.chosen(chip, shape, 8000)
    assert rules is not None and rules.decode == (1, 4)
    assert differing(chip, shape, rules, [range(8000, 8400)])
    assert metal.chosen(chip, shape, CONTEXT).decode == (2, 4)


def test_matmuls_with_unknown_kernel_switches_prove_no_rules():
    shape = Shape(40, 1)  # each call of two rows and more is one of products
    rules = RowRules(RowRange(8, 8), RowRange(8, 8), cuts=THRESHOLDS)
    assert differing(Chip("d", 15), shape, rules, [range(3200, 3300)])
    assert metal.chosen(Chip("d", 15), shape, CONTEXT) is None


# -- sliding windows -------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "step"), [(128, 256), (512, 128), (1024, 256), (4096, 256)])
def test_the_slots_of_a_sliding_window_cross_no_threshold(window: int, step: int):
    assert (drop_step(window), drop_step(700)) == (step, None)
    held = range(window + 2, window + BACK + step + MAX_ROWS)
    assert not {*THRESHOLDS} & {*held[1:]}
    for position in range(window + BACK + step, 9000, 7):
        assert 0 <= position - dropped(window, position) - window - BACK < step


# -- rules that are measured -----------------------------------------------------------------------


KernelOf = Callable[[int, int], int]
"""(keys, rows of a call) -> number of the kernel that the call takes."""


class Simulated:
    contexts = (40,)
    room = 2000

    def __init__(self, kernel: KernelOf) -> None:
        self._kernel = kernel

    def prefill(self, length: int) -> None:
        """Do nothing: a row depends only on its position and its forward pass."""

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        kernel = self._kernel(length, count)
        return np.array([[length + row, kernel] for row in range(outputs)], np.float32)


def by_size(*starts: int) -> KernelOf:
    return lambda keys, rows: sum(rows >= start for start in starts)


FEW_CANDIDATES = [
    RowRules(rows, rows)
    for rows in (RowRange(1, 16), RowRange(2, 16), RowRange(2, 7), RowRange(3, 4), RowRange(1, 1))
]


@pytest.mark.parametrize(
    ("starts", "decode"),
    [((), (1, 16)), ((2,), (2, 16)), ((2, 8), (2, 7)), ((2, 3, 5), (3, 4)), (range(40), (1, 1))],
)
def test_the_first_rules_with_identical_rows_are_chosen(starts: Any, decode: tuple[int, int]):
    rules = measure_rules(Simulated(by_size(*starts)), FEW_CANDIDATES)
    assert rules is not None
    assert rules.decode == decode


def test_rows_are_compared_after_every_context_and_for_each_pass_size():
    def kernel(keys: int, rows: int) -> int:
        return int(keys > 500 and rows == 6)

    prober = Simulated(kernel)
    assert measure_rules(prober, FEW_CANDIDATES[1:3]) == FEW_CANDIDATES[1]
    prober.contexts = (40, 600)
    assert measure_rules(prober, FEW_CANDIDATES[1:3]) is None


def test_rows_that_depend_on_their_index_have_no_rules():
    class Placed(Simulated):
        def rows(self, length: int, count: int, outputs: int) -> Logits:
            return super().rows(length, count, outputs) + np.arange(outputs)[:, None] * (count == 8)

    assert measure_rules(Placed(by_size()), [RowRules(RowRange(8, 8), RowRange(8, 8))]) is None
