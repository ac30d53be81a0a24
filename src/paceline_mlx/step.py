"""A step of the engine between its two halves: the graph, and the outputs of its blocks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Best, DeferredRows, Logits, tap_name
from paceline_mlx.hooks import Array
from paceline_mlx.kv_sequence import MlxSequence

Floats = npt.NDArray[np.float32]


class TapArrays(Mapping[str, Floats]):
    """The tapped hidden states of a block; copied to the host on access."""

    def __init__(self, arrays: dict[int, Array]) -> None:
        """`arrays` are [T, d], by layer."""
        self.arrays = arrays
        """Arrays on the device, by layer: for a drafter that computes there too."""

    def __getitem__(self, name: str) -> Floats:
        """[T, d] float32, by `tap_name`."""
        named = {tap_name(layer): array for layer, array in self.arrays.items()}
        return np.array(named[name].astype(mx.float32))

    def __iter__(self) -> Iterator[str]:
        return map(tap_name, self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


class BlockOutputs(NamedTuple):
    """Lazy outputs of a block."""

    logits: Array | None
    """[rows, vocab] float32; None if `best` replaces them, or the block has no rows."""
    best: tuple[Array, Array] | None
    """Tokens [rows] and scores [rows]."""
    taps: TapArrays


class PendingStep(NamedTuple):
    """A step whose graph is built but perhaps not evaluated."""

    sequences: Sequence[MlxSequence]
    outputs: Sequence[BlockOutputs]
    seconds: float
    """Time to build the graph."""

    @property
    def arrays(self) -> list[Any]:
        """All arrays to evaluate before the next step."""
        outputs = [[output.logits, output.best, output.taps.arrays] for output in self.outputs]
        return [outputs, [sequence.states.arrays() for sequence in self.sequences]]

    def logits(self, vocab_size: int) -> list[Logits]:
        """Per block, [rows, vocab] on the host."""
        none = np.zeros((0, vocab_size), np.float32)
        return [
            none if output.logits is None else np.array(output.logits) for output in self.outputs
        ]

    def best(self) -> list[Best | None]:
        """Per block, its best tokens if it asked for those alone."""
        return [None if output.best is None else _best(*output.best) for output in self.outputs]


def on_device(tokens: Sequence[int]) -> Array:
    """[T] int32. Tokens that the device still computes are not evaluated."""
    if isinstance(tokens, DeferredRows) and isinstance(tokens.array, mx.array):
        count = len(tokens) - len(tokens.known)
        known = mx.array([*tokens.known], mx.int32)
        return mx.concatenate([known, tokens.array[:count].astype(mx.int32)])
    return mx.array([*tokens], mx.int32)


def _best(tokens: Array, scores: Array) -> Best:
    return Best(np.array(tokens).astype(np.int64), np.array(scores))
