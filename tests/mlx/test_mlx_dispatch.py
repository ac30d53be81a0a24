"""Kernels of Apple GPUs, simulated: decoding has the same bits plain and in blocks, or no rule.

Without MLX. Positions are those around each number of keys at which a kernel changes, and samples
between; for some models all up to 66,000.
"""

from collections.abc import Iterator
from itertools import repeat
from random import Random

import pytest

from paceline_mlx import rows as rules
from paceline_mlx.rows import RowRange, most_together
from paceline_mlx.thresholds import BACK, MOST_ROWS, THRESHOLDS, drop_step, dropped
from support import metal
from support.metal import CHIPS, Chip, Shape

CONTEXT = 66_100

SHAPES = {
    **{f"gqa {gqa}": Shape(4 * gqa, 4) for gqa in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)},
    **{f"gqa {gqa}, bf16": Shape(4 * gqa, 4, quantized=False) for gqa in (1, 4, 8)},
    "head 64": Shape(32, 4, head_size=64),
    "head 80": Shape(32, 32, head_size=80),
    "head 256": Shape(8, 4, head_size=256),
    "head 512": Shape(16, 2, head_size=512),
    "wide": Shape(32, 8, width=8192),
    **{f"window {size}": Shape(16, 4, window=size) for size in (128, 512, 1024, 2047, 4096, 32768)},
}

AROUND = [range(keys - 24, keys + 24) for keys in (*THRESHOLDS, 512, 800, 896, 2048, 3000)]
ALL = [range(16, 66_000)]


def blocks(seed: int) -> Iterator[tuple[int, int]]:
    random = Random(seed)
    while True:
        count = random.randint(1, 17)
        yield count, random.randint(1, count)


def differing(chip: Chip, shape: Shape, rule: RowRange, where: list[range]) -> list[int]:
    """Positions whose bits differ between plain decoding and blocks."""
    results = []
    for seed, positions in enumerate(where):
        plain = metal.decoded(chip, shape, rule, positions, repeat((1, 1)))
        drafted = metal.decoded(chip, shape, rule, positions, blocks(seed))
        results += [at for at, kernels in plain.items() if drafted[at] != kernels]
    return results


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("letter", metal.CLASSES.values())
def test_plain_and_drafted_decoding_take_the_same_kernels_on_every_chip(letter: str, name: str):
    shape = SHAPES[name]
    for generation in metal.GENERATIONS:
        chip = Chip(letter, generation)
        rule = metal.chosen(chip, shape, CONTEXT)
        if rule is not None:  # else `exact` is false before the first answer
            assert differing(chip, shape, rule, AROUND) == [], (generation, rule)


@pytest.mark.parametrize("letter", metal.CLASSES.values())
@pytest.mark.parametrize("name", ["gqa 8", "window 512"])
def test_plain_and_drafted_decoding_take_the_same_kernels_at_every_position(name: str, letter: str):
    chip, shape = Chip(letter, 17), SHAPES[name]
    rule = metal.chosen(chip, shape, CONTEXT)
    assert rule is not None
    assert differing(chip, shape, rule, ALL) == []


@pytest.mark.parametrize("letter", metal.CLASSES.values())
@pytest.mark.parametrize("context", [16, 512, 1024, 1100, 4096, 8192, 32768])
def test_a_rule_of_a_short_context_holds_up_to_its_end(letter: str, context: int):
    for gqa in (1, 4, 8):
        chip, shape = Chip(letter, 15), SHAPES[f"gqa {gqa}"]
        rule = metal.chosen(chip, shape, context)
        assert rule is not None
        where = [range(max(0, near.start), min(near.stop, context)) for near in AROUND]
        assert differing(chip, shape, rule, [near for near in where if near]) == []


def test_common_models_have_a_rule_that_lets_them_speculate():
    expected = {
        "gqa 4": (2, 8),
        "gqa 5": (2, 6),
        "gqa 6": (2, 5),
        "gqa 8": (2, 4),
        "gqa 16": (2, 2),
    }
    for name, rule in expected.items():
        for chip in CHIPS:
            assert metal.chosen(chip, SHAPES[name], CONTEXT) is not None, (chip, name)
        assert metal.chosen(Chip("s", 17), SHAPES[name], CONTEXT) == rule
    assert metal.chosen(Chip("g", 17), SHAPES["gqa 4, bf16"], CONTEXT) == (2, 5)


@pytest.mark.parametrize("name", ["gqa 4", "gqa 4, bf16", "wide"])
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"{chip.letter}{chip.generation}")
def test_products_of_several_sequences_up_to_the_chosen_rows_take_one_kernel(chip: Chip, name: str):
    shape = SHAPES[name]
    rule = metal.chosen(chip, shape, 4000)
    assert rule is not None
    alone = metal.weights(chip, shape, rule.least)
    most = most_together(rule, lambda counts: metal.weights(chip, shape, sum(counts)) == alone)
    assert {metal.weights(chip, shape, total) for total in range(rule.least, most + 1)} == {alone}
    if chip.generation == 17 and shape.quantized:
        assert most >= 10


# -- tests that can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["g", "s", "d"])
def test_without_cuts_at_thresholds_rows_differ(letter: str, monkeypatch: pytest.MonkeyPatch):
    chip, shape = Chip(letter, 17), SHAPES["gqa 4"]
    monkeypatch.setattr(rules, "cut", lambda *_: None)
    assert differing(chip, shape, RowRange(2, 8), AROUND)


@pytest.mark.parametrize("letter", ["g", "s", "d"])
def test_where_calls_are_not_cut_the_probe_finds_no_rule(
    letter: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rules, "cut", lambda *_: None)
    assert metal.chosen(Chip(letter, 17), SHAPES["gqa 4"], CONTEXT) is None


def test_a_kernel_of_one_row_at_8_192_keys_is_found_by_calls_of_attention_alone():
    chip, shape = Chip("g", 13), SHAPES["gqa 8"]
    rule = metal.chosen(chip, shape, 8000)
    assert rule == (1, 4)
    assert differing(chip, shape, rule, [range(8000, 8400)])
    assert metal.chosen(chip, shape, CONTEXT) == (2, 4)


def test_products_of_equal_calls_that_may_change_kernels_anywhere_prove_no_rule():
    shape = Shape(40, 1)  # each call of two rows and more is one of products
    assert differing(Chip("d", 15), shape, RowRange(8, 8), [range(3200, 3300)])
    assert metal.chosen(Chip("d", 15), shape, CONTEXT) is None


# -- sliding windows -------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "step"), [(128, 256), (512, 128), (1024, 256), (4096, 256)])
def test_the_slots_that_a_sliding_window_holds_span_no_threshold(window: int, step: int):
    assert drop_step(window) == step
    held = range(window + 2, window + BACK + step + MOST_ROWS)
    assert not {*THRESHOLDS} & {*held[1:]}
    for position in range(window + BACK + step, 9000, 7):
        assert 0 <= position - dropped(window, position) - window - BACK < step


def test_a_sliding_window_without_such_a_step_has_none():
    assert drop_step(700) is None
