"""Operations that move numbers: reshape, transpose, slice, concatenate.

They do not compute, so they do not round.
"""

import numpy as np

from paceline_coreml.rehearsal.ops.table import Array, Arrays, Bools, Cell, Ints, op


@op("transpose", moves=True)
def _transpose(x: Array, perm: Ints) -> Array:
    return x.transpose(perm)


@op("reshape", moves=True)
def _reshape(x: Array, shape: Ints) -> Array:
    """Reshape; 0 keeps the size of x, counted from the last axis, and -1 is inferred."""
    missing = len(shape) - x.ndim
    kept = [x.shape[axis - missing] if axis >= missing else 1 for axis in range(len(shape))]
    return x.reshape([kept[axis] if size == 0 else size for axis, size in enumerate(shape)])


@op("expand_dims", moves=True)
def _expand_dims(x: Array, axes: Ints) -> Array:
    return np.expand_dims(x, axes)


@op("squeeze", moves=True)
def _squeeze(x: Array, axes: Ints | None = None) -> Array:
    """Remove axes of size 1; others stay, even if named."""
    named = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    return np.squeeze(x, tuple(axis for axis in named if x.shape[axis] == 1))


@op("concat", moves=True, interleave=("False",))
def _concat(values: Arrays, axis: int, interleave: bool = False) -> Array:
    return np.concatenate(values, axis)


@op("split", moves=True)
def _split(x: Array, axis: int, split_sizes: Ints) -> Arrays:
    if sum(split_sizes) != x.shape[axis]:
        raise ValueError(f"sizes {list(split_sizes)} do not add up to {x.shape[axis]}")
    return tuple(np.split(x, np.cumsum(split_sizes)[:-1], axis))


@op("tile", moves=True)
def _tile(x: Array, reps: Ints) -> Array:
    return np.tile(x, reps)


@op("slice_by_index", moves=True)
def _slice_by_index(
    x: Array,
    *,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> Array:
    return x[slices(x.shape, (begin, end, stride), (begin_mask, end_mask, squeeze_mask))]


@op("slice_update", moves=True)
def _slice_update(
    x: Array,
    update: Array,
    *,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> Array:
    where = slices(x.shape, (begin, end, stride), (begin_mask, end_mask, squeeze_mask))
    if x[where].shape != update.shape:
        raise ValueError(f"update with shape {update.shape} for a slice of {x[where].shape}")
    if update.shape == x.shape:  # all of x, as in a write to a state
        return update
    changed = x.copy()
    changed[where] = update
    return changed


def slices(
    shape: Ints,
    part: tuple[Ints, Ints, Ints | None],
    masks: tuple[Bools | None, Bools | None, Bools | None],
) -> tuple[slice | int, ...]:
    """Return the Python slices of a MIL slice: begin, end and stride, and masks.

    The three masks, if set for an axis, mean: from the edge; to the edge; only at `begin`.
    """
    begin, end, stride = part
    from_edge, to_edge, only = (mask or (False,) * len(shape) for mask in masks)
    parts: list[slice | int] = []
    for axis, step in enumerate(stride or (1,) * len(shape)):
        first = None if from_edge[axis] else begin[axis]
        if only[axis]:
            parts.append(first or 0)
        else:
            parts.append(slice(first, None if to_edge[axis] else end[axis], step))
    return tuple(parts)


# --- states, which a model keeps between forward passes


@op("read_state", moves=True)
def _read_state(input: Cell) -> Array:
    return input.array


@op("write_state", moves=True)
def _write_state(input: Cell, data: Array) -> Arrays:
    input.array = data  # replaced, so values that were read before do not change
    return ()
