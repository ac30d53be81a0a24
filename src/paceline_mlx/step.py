"""A step of the engine: the forward passes for a block's rows with logits, and their outputs.

A long block is cut into parts (`RowRules`); parts of several sequences share a forward pass.
Invariant: the parts of a sequence run in order, each in one pass.
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
    """The tokens of one sequence, cut into parts, and the outputs of parts that have run."""

    def __init__(self, states: States, tokens: Sequence[int], rules: RowRules) -> None:
        """Cut tokens into parts by `rules`; `states` are caches with all tokens before them."""
        self._states, self._start, self._min_rows = states, states.held, rules.decode.min_rows
        self._rows = _on_device(tokens)
        self.parts = deque(rules.decode.split(len(tokens), states.held, rules.cuts))
        self.calls: list[LazyOutputs] = []

    @property
    def rows(self) -> int:
        part = self.parts[0]
        return max(int(part.stop - part.start), self._min_rows)

    def next(self) -> tuple[States, Array]:
        """Take the next part: return its caches, which hold all earlier tokens, and its tokens."""
        part = self.parts.popleft()
        # Drop the padding of a short pass before a threshold.
        self._states.roll_back(self._start + part.start)
        return self._states, self._rows[part]


class TapArrays(Mapping[str, Logits]):
    """The tapped hidden states of a block; copied to the host on access."""

    def __init__(self, arrays: dict[int, Array]) -> None:
        """Wrap the layers' `arrays`, [T, d] each."""
        self.arrays = arrays
        """Arrays on the device, by layer, for drafters that compute on it."""

    def __getitem__(self, name: str) -> Logits:
        """Return the array [T, d] float32 with this `tap_name`."""
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

    def on_host(self, vocab_size: int) -> tuple[Logits, Best | None]:
        if self.best is not None:
            tokens, scores = map(np.array, self.best)
            return np.zeros((0, vocab_size), np.float32), Best(tokens.astype(np.int64), scores)
        if self.logits is None:
            return np.zeros((0, vocab_size), np.float32), None
        return np.array(self.logits), None


def _on_device(tokens: Sequence[int]) -> Array:
    """Return tokens as [T] int32. Tokens that the device is still computing are not evaluated."""
    if isinstance(tokens, DeferredRows) and isinstance(tokens.array, mx.array):
        count = len(tokens) - len(tokens.known)
        known = mx.array([*tokens.known], mx.int32)
        return mx.concatenate([known, tokens.array[:count].astype(mx.int32)])
    return mx.array([*tokens], mx.int32)
