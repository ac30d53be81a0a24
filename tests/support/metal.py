"""The kernels that MLX chooses on Apple GPUs, and the resulting bits of rows, without a Mac.

From reading MLX 0.32.4 (`mlx/backend/metal`: `scaled_dot_product_attention.cpp`, `quantized.cpp`,
`matmul.cpp`). Two kernels of one number are taken to differ in a row's last bit, always.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from paceline.decoding.types import Logits
from paceline.engines.rows import RowRules
from paceline_mlx.rows import RowBits, attention_calls, candidates, measure_rules, model_contexts
from paceline_mlx.thresholds import dropped

CLASSES = {"base": "g", "Pro": "p", "Max": "s", "Ultra": "d"}
"""Class of a chip -> last letter of its architecture, as MLX reads it."""

GENERATIONS = (13, 14, 15, 16, 17)
_FUSED = {64, 96, 128, 256}
_TILED = {64, 72, 80, 96, 128}

Kernels = tuple[object, ...]


class Chip(NamedTuple):
    letter: str
    generation: int


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_size: int = 128
    width: int = 2048
    quantized: bool = True
    window: int | None = None

    @property
    def gqa(self) -> int:
        return self.heads // self.kv_heads


CHIPS = [Chip(letter, gen) for letter, gen in product(CLASSES.values(), GENERATIONS)]


@cache
def attention(letter: str, shape: Shape, keys: int, rows: int, *, masked: bool = False) -> Kernels:
    if rows > 8 and shape.head_size in _TILED:
        return ("tiles",)
    single = shape.head_size == 512 and rows == 1 and shape.gqa == 8 and keys >= 1024
    if not (fused(shape, rows) or (single and not masked)):
        large = letter == "d" and shape.heads * rows * keys >= 1 << 20
        return ("products", rows == 1, keys > 4096, large)
    if not (letter in "sd" and keys >= 1024) and not (shape.gqa > 1 and keys >= 4096):
        return ("one pass",)
    shared = {64: (8,), 128: (8, 12, 16)}.get(shape.head_size, ())
    if rows == 1 and not masked and keys >= 8192 and shape.gqa in shared:
        return ("two passes in order", keys)
    return ("two passes", _parts(letter, shape.gqa * rows, keys))


def fused(shape: Shape, rows: int) -> bool:
    if rows > 8:
        return shape.head_size in _TILED
    return shape.head_size in _FUSED and rows * shape.gqa <= 32


def _parts(letter: str, sums: int, keys: int) -> int:
    if letter == "s":
        if keys <= 1024 or sums <= 4:
            return 64
        return next(
            (n for most, n in ((8192, 128), (32768, 256), (65536, 512)) if keys <= most), 1024
        )
    if letter == "d":
        if sums <= 2 and keys > 8192:
            return 256
        if sums >= 6 and keys >= 16384:
            return 512 if keys < 65536 else 1024
        return 128
    return 64 if sums >= 4 else 32


@cache
def weights(chip: Chip, shape: Shape, rows: int) -> Kernels:
    if not shape.quantized:
        if chip.generation < 15:
            return ("gemv" if rows == 1 else "gemm",)
        return (next(name for most, name in ((1, 1), (5, 32), (15, 16), (999, 0)) if rows <= most),)
    limits = {
        13: (14, 10, 6),
        14: (14, 10, 6),
        15: (13, 15, 13),
        16: (13, 15, 13),
        17: (33, 25, 13),
    }
    by_width = (32, 18, 12) if chip.letter == "d" else limits[chip.generation]
    limit = by_width[(shape.width > 2048) + (shape.width > 4096)]
    if rows >= limit:
        return ("qmm",)
    return ("wide" if chip.generation >= 15 and rows > 1 else "qmv",)


def row(chip: Chip, shape: Shape, position: int, rows: int) -> Kernels:
    """The kernels of all rows of a call of `rows` rows, padding included, at a position."""
    return (attention_of(chip.letter, shape, position, rows), weights(chip, shape, rows))


def attention_of(letter: str, shape: Shape, position: int, rows: int) -> Kernels:
    front = 0 if shape.window is None else dropped(shape.window, position)
    keys = position + rows - front
    masked = shape.window is not None and keys > shape.window
    return attention(letter, shape, keys, rows, masked=masked)


class _Calls:
    def __init__(self, chip: Chip, shape: Shape, context_length: int) -> None:
        self.contexts, self.room = model_contexts(context_length), context_length
        self._chip, self._shape = chip, shape
        self._numbers: dict[Kernels, int] = {}

    def prefill(self, length: int) -> None:
        pass

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        kernels = row(self._chip, self._shape, length, count)
        number = self._numbers.setdefault(kernels, len(self._numbers))
        return np.array([[length + n, number] for n in range(outputs)], np.float32)


def chosen(chip: Chip, shape: Shape, context_length: int) -> RowRules | None:
    rules = candidates(
        drops_padding=True,
        fused=lambda rows: fused(shape, rows),
        attention=[_attention_bits(chip.letter, shape, context_length)],
    )
    return measure_rules(_Calls(chip, shape, context_length), rules)


@cache
def _attention_bits(letter: str, shape: Shape, context_length: int) -> RowBits:
    return {
        (rows, at): [str(attention_of(letter, shape, at, rows)).encode()] * rows
        for rows, at in attention_calls(context_length, shape.window)
    }


def decoded(
    chip: Chip, shape: Shape, rules: RowRules, positions: range, blocks: Iterator[tuple[int, int]]
) -> dict[int, Kernels]:
    values: dict[int, Kernels] = {}
    at = positions.start
    while at < positions.stop:
        count, accepted = (min(item, positions.stop - at) for item in next(blocks))
        for part in rules.decode.split(count, at, rules.cuts):
            rows = max(part.stop - part.start, rules.decode.min_rows)
            kernels = row(chip, shape, at + part.start, rows)
            values.update({at + n: kernels for n in range(part.start, min(part.stop, accepted))})
        at += accepted
    return values
