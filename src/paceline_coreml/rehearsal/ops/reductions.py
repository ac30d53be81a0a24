"""Reductions along axes: sums and extremes.

Why rows are independent: the reduced axes become one last axis of n contiguous numbers in new
memory. numpy sums such vectors one by one, in an order given by n. Extremes do not round.
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
    return reduced(np.add, x, axes)


def _sum(moved: Array) -> Array:
    """Sum every vector, [..., n]."""
    groups = grouped(moved)
    if groups is None:
        sums: Array = np.add.reduce(moved, axis=-1, dtype=moved.dtype)
        return sums
    return added(np.add.reduce(groups, axis=-1, dtype=moved.dtype))


def largest(x: Array, axes: Ints | None) -> Array:
    """Return the maximum along axes, kept with size 1; +0 for zeros."""
    return reduced(np.maximum, x, axes) + 0


def mean(x: Array, axes: Ints | None) -> Array:
    sums = total(x, axes)
    return sums / (x.size // sums.size)


def _reduction(compute: Callable[[Array, Ints | None], Array]) -> Callable[..., Array]:
    def run(x: Array, axes: Ints | None = None, keep_dims: bool = False) -> Array:
        values = compute(x, axes)
        if keep_dims:
            return values
        return np.squeeze(values, None if axes is None else tuple(axis % x.ndim for axis in axes))

    return run


for _name, _compute in {"reduce_sum": total, "reduce_mean": mean, "reduce_max": largest}.items():
    op(_name)(_reduction(_compute))


@op("softmax")
def _softmax(x: Array, axis: int = -1) -> Array:
    """Compute softmax of differences to the maximum, to avoid overflow."""
    powers = exp(x - largest(x, (axis,)))
    return powers / total(powers, (axis,))
