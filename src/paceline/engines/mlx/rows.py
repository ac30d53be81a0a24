"""How many rows a call may have, so that a row does not depend on how many it has.

MLX's kernels are chosen by the number of rows: on Apple GPUs a product with one row takes another
one than a product with several, and from some number on, which depends on the chip and on the
matrix, yet another; attention has one for up to eight rows. Which numbers of rows agree is
therefore asked of the model that was loaded, on the machine that it runs on, before anything else
is run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.engines.mlx.model import LoadedModel
from paceline.engines.mlx.states import States

_CONTEXTS = (48, 6144)
"""Slots in front of the calls that are compared. Attention takes another kernel from 1024 or 4096
slots on; so many are not computed for this, but made up."""

_TRIED = (1, 2, 3, 4, 8, 32)
_OFFSETS = (0, 3)
"""Where calls begin, behind the context: a position comes to be in another place of its call."""


class RowRange(NamedTuple):
    """Calls have so many rows: a longer block is cut, a shorter one filled up."""

    least: int
    most: int

    def cut(self, count: int) -> Iterator[slice]:
        """The parts of a block of `count` rows that are a call each."""
        return (slice(at, min(at + self.most, count)) for at in range(0, count, self.most))

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


ANY = RowRange(1, 32)
"""Where no number of rows makes a difference, and where nothing is promised."""

CANDIDATES = (ANY, RowRange(1, 8), RowRange(1, 4), RowRange(2, 8), RowRange(2, 4), RowRange(8, 8))
"""In the order of what they cost. The last gives every call the same number."""

Seen = Mapping[tuple[int, int], Sequence[bytes]]
"""For calls (rows, offset) the bits of each row's logits."""


def choose(model: LoadedModel, context_length: int) -> RowRange | None:
    """The first of the candidates whose rows are the same in every call; None: in none of them."""
    seen = [
        _look(model, context)
        for context in _CONTEXTS
        if context + sum(_OFFSETS) + max(_TRIED) <= context_length
    ]
    return next((rows for rows in CANDIDATES if all(agree(rows, each) for each in seen)), None)


def agree(rows: RowRange, seen: Seen) -> bool:
    """Whether every position has the same bits in all calls of so many rows."""
    known: dict[int, bytes] = {}
    for (count, offset), found in seen.items():
        if rows.least <= count <= rows.most:
            for at, bits in enumerate(found, offset):
                if known.setdefault(at, bits) != bits:
                    return False
    return True


def _look(model: LoadedModel, context: int) -> Seen:
    rng = np.random.default_rng(0)
    read = min(context, _CONTEXTS[0])
    # Which tokens there are is known before the vocabulary's size is: every model has so many.
    tokens = rng.integers(0, 32, read + max(_OFFSETS) + max(_TRIED)).tolist()
    states = model.empty()
    _evaluate(states, model.call(states, tokens[:read]).logits)
    if context > read:
        states.stretch(context - read)
    tokens = tokens[read:]
    # What comes before an offset is computed once, and the same for all calls behind it.
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
