"""What networks in MLX share: the target's ends, matrices, keys and values, evaluation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from paceline.decoding.types import tap_name
from paceline.drafters.networks.tensors import Array

MlxArray = Any
"""An `mlx.core.array`; lazy."""

_GROUPS = (64, 32)
"""Quantization group sizes, in columns; the first that divides a row is used."""


class MlxTarget(Protocol):
    """Embeddings and head of a target in MLX."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    def embed(self, tokens: MlxArray) -> MlxArray:
        """Embeddings [..., d] of token ids [...]."""
        ...

    def head(self, hidden: MlxArray) -> MlxArray:
        """Logits [..., vocab] of hidden states [..., d]."""
        ...

    def head_of(self, tokens: MlxArray) -> Callable[[MlxArray], MlxArray]:
        """The head for these tokens [n] alone, with logits [..., n]."""
        ...


class Matrix:
    """A linear layer's weight [out, in]: quantized if `bits` is set and a group size fits."""

    def __init__(self, weight: MlxArray, bits: int | None) -> None:
        import mlx.core as mx

        self._bits = bits
        self._group = next((size for size in _GROUPS if weight.shape[1] % size == 0), None)
        self._parts = [weight]
        if bits is not None and self._group is not None:
            self._parts = list(mx.quantize(weight, group_size=self._group, bits=bits))
        mx.eval(self._parts)

    def __call__(self, rows: MlxArray) -> MlxArray:
        """[R, in] -> [R, out]."""
        import mlx.core as mx

        if len(self._parts) == 1:
            return rows @ self._parts[0].T
        return mx.quantized_matmul(rows, *self._parts, group_size=self._group, bits=self._bits)


class DeviceKV:
    """Keys and values in caches of mlx-lm, one a layer, [1, kv_heads, n, head_dim]."""

    def __init__(self, layers: int) -> None:
        from mlx_lm.models.cache import KVCache

        self.caches = [KVCache() for _ in range(layers)]

    def copy(self) -> "DeviceKV":
        """An independent copy."""
        duplicate = DeviceKV(len(self.caches))
        for source, destination in zip(self.caches, duplicate.caches, strict=True):
            if source.keys is not None:
                keys, values, count = source.state
                # Writing to an array changes it for every holder; slices are arrays of their own.
                destination.state = (keys[..., :count, :], values[..., :count, :], count)
        evaluate(duplicate.arrays())
        return duplicate

    def first(self, tapped: MlxArray, count: int) -> MlxArray:
        """The first `count` rows of pending hidden states."""
        return evaluate(tapped[:count])

    def truncate(self, count: int) -> None:
        """Drop all but the first `count` rows."""
        for cache in self.caches:
            cache.trim(cache.offset - count)

    def arrays(self) -> list[MlxArray]:
        """All keys and values."""
        return [cache.state[:2] for cache in self.caches if cache.keys is not None]


def to_host(array: MlxArray, *also: MlxArray) -> list[Any]:
    """Evaluate all arrays; the values of the first."""
    import mlx.core as mx

    mx.eval(array, *also)
    numbers: list[Any] = np.array(array).tolist()
    return numbers


def evaluate(arrays: Any) -> Any:
    """Start evaluation, without waiting: another thread cannot evaluate this thread's graph."""
    import mlx.core as mx

    mx.async_eval(arrays)
    return arrays


def tapped_rows(
    taps: Mapping[str, Array], layers: Sequence[int], rows: int, dtype: Any
) -> MlxArray:
    """Hidden states of a call's first `rows` rows, [rows, layers * d], evaluated.

    Taken from `taps.arrays` (layer -> array on the device) where the engine has it.
    """
    import mlx.core as mx

    arrays = getattr(taps, "arrays", None)
    if arrays is None:
        arrays = {layer: mx.array(taps[tap_name(layer)]) for layer in layers}
    tapped = mx.concatenate([arrays[layer][:rows] for layer in layers], axis=1)
    return evaluate(tapped.astype(dtype))
