"""A step of the engine: the calls that a block's rows with logits are cut into, and its outputs.

A long block is cut into parts (`RowRules`); parts of several sequences share a call. Invariant: the
parts of a sequence run in order, each in one call.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from paceline.decoding.types import Best, DeferredRows, Logits, tap_name
from paceline.engines.rows import RowRules
from paceline_mlx.hooks import Array
from paceline_mlx.model import LazyOutputs
from paceline_mlx.states import States


class Decode:
    """Tokens of one sequence, cut into parts, and the calls that were made of them."""

    def __init__(self, states: States, tokens: Sequence[int], rules: RowRules) -> None:
        """`states`: the caches, which hold the tokens before; `rules`: of the parts."""
        self._states, self._start, self._min_rows = states, states.held, rules.decode.least
        self._rows = _on_device(tokens)
        self.parts = deque(rules.decode.split(len(tokens), states.held, rules.cuts))
        self.calls: list[LazyOutputs] = []

    @property
    def rows(self) -> int:
        part = self.parts[0]
        return max(int(part.stop - part.start), self._min_rows)

    def next(self) -> tuple[States, Array]:
        """Take the next part: the caches, which hold all before it, and its tokens."""
        part = self.parts.popleft()
        # Drop the padding of a short call before a threshold.
        self._states.roll_back(self._start + part.start)
        return self._states, self._rows[part]


def grouped(decodes: Sequence[Decode], max_rows: int) -> Iterator[list[Decode]]:
    """Groups whose next parts have at most `max_rows` rows together; one alone may have more."""
    group: list[Decode] = []
    total = 0
    for decode in decodes:
        if group and total + decode.rows > max_rows:
            yield group
            group, total = [], 0
        group.append(decode)
        total += decode.rows
    if group:
        yield group


class TapArrays(Mapping[str, Logits]):
    """The tapped hidden states of a block; copied to the host on access."""

    def __init__(self, arrays: dict[int, Array]) -> None:
        """`arrays` are [T, d], by layer."""
        self.arrays = arrays
        """Arrays on the device, by layer: for a drafter that computes there too."""

    def __getitem__(self, name: str) -> Logits:
        """[T, d] float32, by `tap_name`."""
        named = {tap_name(layer): array for layer, array in self.arrays.items()}
        return np.array(named[name].astype(mx.float32))

    def __iter__(self) -> Iterator[str]:
        return map(tap_name, self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


class BlockOutputs(NamedTuple):
    logits: Array | None
    """[rows, vocab] float32; None if `best` replaces them, or the block has no rows."""
    best: tuple[Array, Array] | None
    """Tokens [rows] and scores [rows]."""
    taps: TapArrays

    @property
    def arrays(self) -> list[Any]:
        return [self.logits, self.best, self.taps.arrays]

    def on_host(self, vocab_size: int) -> Logits:
        if self.logits is None:
            return np.zeros((0, vocab_size), np.float32)
        return np.array(self.logits)

    def best_on_host(self) -> Best | None:
        if self.best is None:
            return None
        tokens, scores = self.best
        return Best(np.array(tokens).astype(np.int64), np.array(scores))


def _on_device(tokens: Sequence[int]) -> Array:
    """[T] int32. Tokens that the device still computes are not evaluated."""
    if isinstance(tokens, DeferredRows) and isinstance(tokens.array, mx.array):
        count = len(tokens) - len(tokens.known)
        known = mx.array([*tokens.known], mx.int32)
        return mx.concatenate([known, tokens.array[:count].astype(mx.int32)])
    return mx.array([*tokens], mx.int32)
