"""Reductions along axes: sums, extremes, norms, sorting.

Why rows are independent: the reduced axes become one last axis of n contiguous numbers in new
memory. numpy sums such vectors one by one, in an order given by n alone. Extremes and sorting do
not round; of equal numbers the first wins.
"""

import math
from collections.abc import Callable

import numpy as np

from paceline_coreml.rehearsal.ops.elementwise import exp
from paceline_coreml.rehearsal.ops.products import added, grouped
from paceline_coreml.rehearsal.ops.table import Array, Ints, op


def reduced(function: np.ufunc, x: Array, axes: Ints | None) -> Array:
    """Reduce along axes (None: all), keeping them with size 1."""
    going = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    staying = [axis for axis in range(x.ndim) if axis not in going]
    count = math.prod(x.shape[axis] for axis in going)
    moved = np.ascontiguousarray(x.transpose(*staying, *sorted(going)))
    vectors = moved.reshape(-1, count)
    values = (
        _sum(vectors)
        if function is np.add
        else function.reduce(vectors, axis=-1, dtype=vectors.dtype)
    )
    return values.reshape([1 if axis in going else size for axis, size in enumerate(x.shape)])


def total(x: Array, axes: Ints | None) -> Array:
    """The sum along axes, kept with size 1."""
    return reduced(np.add, x, axes)


def _sum(moved: Array) -> Array:
    """The sum of every vector, [..., n]."""
    groups = grouped(moved)
    if groups is None:
        sums: Array = np.add.reduce(moved, axis=-1, dtype=moved.dtype)
        return sums
    return added(np.add.reduce(groups, axis=-1, dtype=moved.dtype))


def largest(x: Array, axes: Ints | None) -> Array:
    """The maximum along axes, kept with size 1; +0 for zeros."""
    return reduced(np.maximum, x, axes) + 0


def softmax(x: Array, axis: int = -1) -> Array:
    """Softmax along an axis, of differences to the maximum, which avoids overflow."""
    powers = exp(x - largest(x, (axis,)))
    return powers / total(powers, (axis,))


def mean(x: Array, axes: Ints | None) -> Array:
    """The mean along axes, kept with size 1."""
    sums = total(x, axes)
    return sums / (x.size // sums.size)


def _reduction(compute: Callable[[Array, Ints | None], Array]) -> Callable[..., Array]:
    def run(x: Array, axes: Ints | None = None, keep_dims: bool = False) -> Array:
        values = compute(x, axes)
        if keep_dims:
            return values
        return np.squeeze(values, None if axes is None else tuple(axis % x.ndim for axis in axes))

    return run


_REDUCTIONS: dict[str, Callable[[Array, Ints | None], Array]] = {
    "reduce_sum": total,
    "reduce_mean": mean,
    "reduce_sum_square": lambda x, axes: total(np.square(x), axes),
    "reduce_l2_norm": lambda x, axes: np.sqrt(total(np.square(x), axes)),
    "reduce_max": largest,
    "reduce_min": lambda x, axes: reduced(np.minimum, x, axes) + 0,
    "reduce_prod": lambda x, axes: reduced(np.multiply, x, axes),
}

for _name, _compute in _REDUCTIONS.items():
    op(_name)(_reduction(_compute))


@op("reduce_argmax", output_dtype=("int32", "uint16"))
def _argmax(
    x: Array, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32"
) -> Array:
    indices: Array = np.argmax(x, axis, keepdims=keep_dims)
    return indices


@op("argsort")
def _argsort(x: Array, axis: int = -1, ascending: bool = False) -> Array:
    return ordered(x, axis, ascending)


@op("topk", output_indices_dtype=("int32", "uint16"))
def _topk(
    x: Array,
    *,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> Array | tuple[Array, Array]:
    """Always sorted: without `sort` MIL allows any order."""
    if not 0 < k <= x.shape[axis]:
        raise ValueError(f"k is {k}; expected 1 to {x.shape[axis]}")
    indices = np.take(ordered(x, axis, ascending), range(k), axis)
    values = np.take_along_axis(x, indices, axis)
    return (values, indices) if return_indices else values


@op("cumsum")
def _cumsum(x: Array, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Array:
    x = np.flip(x, axis) if reverse else x
    sums = np.cumsum(x, axis, dtype=x.dtype)
    if exclusive:
        first = np.zeros_like(np.take(sums, [0], axis))
        before = np.take(sums, range(x.shape[axis] - 1), axis)
        sums = np.concatenate([first, before], axis)
    return np.flip(sums, axis) if reverse else sums


@op("softmax")
def _softmax(x: Array, axis: int = -1) -> Array:
    return softmax(x, axis)


@op("layer_norm")
def _layer_norm(
    x: Array,
    axes: Ints | None = None,
    gamma: Array | None = None,
    beta: Array | None = None,
    epsilon: float = 1e-5,
) -> Array:
    going = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    shape = [size if axis in going else 1 for axis, size in enumerate(x.shape)]
    count = math.prod(shape)
    away = x - total(x, axes) / count
    normalized = away / np.sqrt(total(np.square(away), axes) / count + epsilon)
    if gamma is not None:
        normalized = normalized * gamma.reshape(shape)
    return normalized if beta is None else normalized + beta.reshape(shape)


@op("l2_norm")
def _l2_normalized(x: Array, epsilon: float = 1e-6) -> Array:
    """Over the last three axes, for every rank."""
    return x / np.sqrt(total(np.square(x), (-3, -2, -1)) + epsilon)


def ordered(x: Array, axis: int, ascending: bool) -> Array:
    """Indices that sort the numbers along an axis, stable."""
    signed = x if x.dtype.kind == "f" else x.astype(np.int64)
    return np.argsort(signed if ascending else -signed, axis, stable=True)
