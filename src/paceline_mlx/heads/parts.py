"""What heads share: matrices, keys and values on the device, evaluation, and the target's fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from paceline.decoding.types import tap_name
from paceline.errors import ModelError
from paceline_mlx.hooks import Array
from paceline_mlx.model import LoadedModel

_GROUPS = (64, 32)
"""Quantization group sizes, in columns; the first that divides a row is used."""


def check_pair(folder: Path, config: Any, target: LoadedModel) -> Any:
    """Check that a head of this config fits its target; returns the dtype of hidden states.

    Raises ModelError: the message names every size that differs.
    """
    embedded = target.embed(mx.array([0]))  # lazy: only its shape and dtype are used
    pairs = {
        "hidden size": (config.hidden_size, embedded.shape[-1]),
        "number of target layers": (config.num_target_layers, target.layers),
        "vocabulary": (config.vocab_size, target.head(embedded).shape[-1]),
    }
    faults = [
        f"its {name} is {its}, the target's {targets}"
        for name, (its, targets) in pairs.items()
        if its is not None and its != targets
    ]
    if faults:
        raise ModelError(f"{folder} is a drafter for another target: {'; '.join(faults)}")
    return embedded.dtype


class Matrix:
    """A linear layer's weight [out, in]: quantized if `bits` is set and a group size fits."""

    def __init__(self, weight: Array, bits: int | None) -> None:
        self._bits = bits
        self._group = next((size for size in _GROUPS if weight.shape[1] % size == 0), None)
        self._parts = [weight]
        if bits is not None and self._group is not None:
            self._parts = list(mx.quantize(weight, group_size=self._group, bits=bits))
        mx.eval(self._parts)

    def __call__(self, rows: Array) -> Array:
        """[R, in] -> [R, out]."""
        if len(self._parts) == 1:
            return rows @ self._parts[0].T
        return mx.quantized_matmul(rows, *self._parts, group_size=self._group, bits=self._bits)


class DeviceKV:
    """Keys and values in caches of mlx-lm, one a layer, [1, kv_heads, n, head_dim]."""

    def __init__(self, layers: int) -> None:
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

    def truncate(self, count: int) -> None:
        """Drop all but the first `count` rows."""
        for cache in self.caches:
            cache.trim(cache.offset - count)

    def arrays(self) -> list[Array]:
        """All keys and values."""
        return [cache.state[:2] for cache in self.caches if cache.keys is not None]


def swiglu(gate_up: Matrix, down: Matrix, rows: Array) -> Array:
    """[R, d] -> [R, d]; `gate_up` has the rows of both matrices."""
    gate, up = mx.split(gate_up(rows), 2, axis=-1)
    return down(gate * mx.sigmoid(gate) * up)


def to_host(array: Array, *also: Array) -> list[Any]:
    """Evaluate all arrays; the values of the first."""
    mx.eval(array, *also)
    numbers: list[Any] = np.array(array).tolist()
    return numbers


def evaluate(arrays: Any) -> Any:
    """Start evaluation, without waiting: another thread cannot evaluate this thread's graph."""
    mx.async_eval(arrays)
    return arrays


def tapped_rows(
    taps: Mapping[str, npt.NDArray[np.float32]], layers: Sequence[int], rows: int, dtype: Any
) -> Array:
    """Hidden states of a call's first `rows` rows, [rows, layers * d], evaluated.

    Taken from `taps.arrays` (layer -> array on the device) where the engine has it. They stay valid
    when the engine runs its next call.
    """
    arrays = getattr(taps, "arrays", None)
    if arrays is None:
        arrays = {layer: mx.array(taps[tap_name(layer)]) for layer in layers}
    tapped = mx.concatenate([arrays[layer][:rows] for layer in layers], axis=1)
    return evaluate(tapped.astype(dtype))
