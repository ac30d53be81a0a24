"""Least and most rows of a call, chosen so that a row's bits do not depend on the number of rows.

MLX picks kernels by the number of rows. On Apple GPUs a product with one row takes another kernel
than one with several; a third begins at a number that depends on chip and matrix; attention has
its own for up to eight rows. So the loaded model is measured on its machine before it is used.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.engines.mlx.model import LoadedModel
from paceline.engines.mlx.states import States

_CONTEXTS = (48, 6144)
"""Context lengths of the compared calls. Attention takes another kernel from 1024 or 4096 slots on;
the long context is random, not computed."""

_TRIED = (1, 2, 3, 4, 8, 32)
_OFFSETS = (0, 3)
"""First rows of the calls, after the context: so a position has several rows of its calls."""


class RowRange(NamedTuple):
    """Least and most rows of a call: a longer block is split, a shorter one padded."""

    least: int
    most: int

    def split(self, count: int) -> Iterator[slice]:
        """Slices of a block of `count` rows, one for each call."""
        return (slice(at, min(at + self.most, count)) for at in range(0, count, self.most))

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


ANY = RowRange(1, 32)
"""If the number of rows makes no difference, or if `min_rows` is 1."""

CANDIDATES = (ANY, RowRange(1, 8), RowRange(1, 4), RowRange(2, 8), RowRange(2, 4), RowRange(8, 8))
"""By ascending cost. The last gives every call the same number of rows."""

RowBits = Mapping[tuple[int, int], Sequence[bytes]]
"""Call (rows, offset) -> the bits of each row's logits."""


def choose(model: LoadedModel, context_length: int) -> RowRange | None:
    """The first candidate for which every call gives equal bits; None: no candidate does."""
    measured = [
        _row_bits(model, context)
        for context in _CONTEXTS
        if context + sum(_OFFSETS) + max(_TRIED) <= context_length
    ]
    return next((rows for rows in CANDIDATES if all(agree(rows, each) for each in measured)), None)


def agree(rows: RowRange, measured: RowBits) -> bool:
    """True if every position has the same bits in all calls with a number of rows in `rows`."""
    known: dict[int, bytes] = {}
    for (count, offset), found in measured.items():
        if rows.least <= count <= rows.most:
            for at, bits in enumerate(found, offset):
                if known.setdefault(at, bits) != bits:
                    return False
    return True


def _row_bits(model: LoadedModel, context: int) -> RowBits:
    rng = np.random.default_rng(0)
    prefix = min(context, _CONTEXTS[0])
    # The vocabulary's size is not known yet; every model has 32 tokens.
    tokens = rng.integers(0, 32, prefix + max(_OFFSETS) + max(_TRIED)).tolist()
    states = model.empty()
    _evaluate(states, model.call(states, tokens[:prefix]).logits)
    if context > prefix:
        states.stretch(context - prefix)
    tokens = tokens[prefix:]
    # Rows before an offset are computed once, the same for all calls after it.
    found = {}
    done = 0
    for offset in _OFFSETS:
        if offset > done:
            _evaluate(states, model.call(states, tokens[done:offset], drafted=True).logits)
            done = offset
        for count in _TRIED:
            if offset + count > len(tokens):
                continue
            called = model.call(states, tokens[offset : offset + count], drafted=True)
            _evaluate(states, called.logits)
            rows = np.array(called.logits.astype(_float32()))
            found[count, offset] = [row.tobytes() for row in rows]
            states.settle(context + offset)
    return found


def _evaluate(states: States, *also: Any) -> None:
    import mlx.core as mx

    mx.eval(states.arrays(), also)


def _float32() -> Any:
    import mlx.core as mx

    return mx.float32
