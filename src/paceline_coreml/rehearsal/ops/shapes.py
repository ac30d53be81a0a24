"""Operations that move numbers (reshape, transpose, slice, gather, copy), or make shapes and masks.

None computes with a model's numbers, so nothing here rounds.
"""

import numpy as np

from paceline_coreml.rehearsal.ops.table import Array, Arrays, Bools, Ints, op


@op("transpose", moves=True)
def _transpose(x: Array, perm: Ints) -> Array:
    return x.transpose(perm)


@op("reshape", moves=True)
def _reshape(x: Array, shape: Ints) -> Array:
    """0 keeps the size of x, counted from the last axis; -1 is inferred."""
    missing = len(shape) - x.ndim
    kept = [x.shape[axis - missing] if axis >= missing else 1 for axis in range(len(shape))]
    return x.reshape([kept[axis] if size == 0 else size for axis, size in enumerate(shape)])


@op("expand_dims", moves=True)
def _expand_dims(x: Array, axes: Ints) -> Array:
    return np.expand_dims(x, axes)


@op("squeeze", moves=True)
def _squeeze(x: Array, axes: Ints | None = None) -> Array:
    """Axes of another size than 1 stay, even if named."""
    named = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    return np.squeeze(x, tuple(axis for axis in named if x.shape[axis] == 1))


@op("concat", moves=True)
def _concat(values: Arrays, axis: int, interleave: bool = False) -> Array:
    if not interleave:
        return np.concatenate(values, axis)
    axis %= values[0].ndim
    shape = list(values[0].shape)
    shape[axis] *= len(values)
    return np.stack(values, axis + 1).reshape(shape)


@op("stack", moves=True)
def _stack(values: Arrays, axis: int) -> Array:
    return np.stack(values, axis)


@op("split", moves=True)
def _split(
    x: Array, axis: int, num_splits: int | None = None, split_sizes: Ints | None = None
) -> Arrays:
    if split_sizes is None:
        return tuple(np.split(x, num_splits or 1, axis))
    if sum(split_sizes) != x.shape[axis]:
        raise ValueError(f"sizes {list(split_sizes)} do not make up {x.shape[axis]}")
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
        raise ValueError(f"an update of shape {update.shape} for a slice of {x[where].shape}")
    if update.shape == x.shape:  # the whole of x, as in a write to a state
        return update
    changed = x.copy()
    changed[where] = update
    return changed


@op("slice_by_size", moves=True)
def _slice_by_size(x: Array, begin: Ints, size: Ints) -> Array:
    """A size of -1 goes to the end."""
    parts = []
    for first, length, whole in zip(begin, size, x.shape, strict=True):
        start = first + whole if first < 0 else first
        stop = whole if length == -1 else start + length
        if not 0 <= start <= stop <= whole:
            raise ValueError(f"a slice from {start} to {stop} of {whole}")
        parts.append(slice(start, stop))
    return x[tuple(parts)]


@op("gather", moves=True)
def _gather(
    x: Array, indices: Array, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False
) -> Array:
    """An index out of range is an error: its result on a device is undefined."""
    axis %= x.ndim
    check_indices(indices, x.shape[axis])
    if not batch_dims:
        return np.take(x, indices, axis)
    shared = x.shape[:batch_dims]
    parts = [np.take(x[at], indices[at], axis - batch_dims) for at in np.ndindex(shared)]
    return np.stack(parts).reshape(*shared, *parts[0].shape)


@op("gather_along_axis", moves=True)
def _gather_along_axis(
    x: Array, indices: Array, axis: int = 0, validate_indices: bool = False
) -> Array:
    check_indices(indices, x.shape[axis])
    return np.take_along_axis(x, indices.astype(np.int64), axis)


@op("range_1d")
def _range_1d(start: Array, end: Array, step: Array) -> Array:
    return np.arange(start.item(), end.item(), step.item())


@op("shape", moves=True)
def _shape(x: Array) -> Array:
    return np.array(x.shape, np.int32)


@op("fill", moves=True)
def _fill(shape: Ints, value: Array | None = None) -> Array:
    return np.full(shape, 0 if value is None else value)


@op("fill_like", moves=True)
def _fill_like(ref_tensor: Array, value: Array | None = None) -> Array:
    return np.full(ref_tensor.shape, 0 if value is None else value)


@op("one_hot", moves=True)
def _one_hot(
    indices: Array,
    one_hot_vector_size: int,
    axis: int = -1,
    on_value: Array | None = None,
    off_value: Array | None = None,
) -> Array:
    check_indices(indices, one_hot_vector_size)
    hot = np.arange(one_hot_vector_size) == indices[..., None]
    on, off = (1 if on_value is None else on_value), (0 if off_value is None else off_value)
    return np.where(np.moveaxis(hot, -1, axis), on, off)


@op("band_part", moves=True)
def _band_part(x: Array, lower: int = -1, upper: int = -1) -> Array:
    rows, columns = np.ogrid[: x.shape[-2], : x.shape[-1]]
    kept = np.ones(x.shape[-2:], np.bool_)
    if lower >= 0:
        kept &= rows - columns <= lower
    if upper >= 0:
        kept &= columns - rows <= upper
    return np.where(kept, x, 0)


@op("pad", mode=("constant",), moves=True)
def _pad(x: Array, pad: Ints, mode: str = "constant", constant_val: float = 0.0) -> Array:
    """`pad` has two numbers, before and after, per axis, for the last axes."""
    missing = x.ndim - len(pad) // 2
    widths = [(0, 0)] * missing + list(zip(pad[::2], pad[1::2], strict=True))
    return np.pad(x, widths, constant_values=constant_val)


def slices(
    shape: Ints,
    part: tuple[Ints, Ints, Ints | None],
    masks: tuple[Bools | None, Bools | None, Bools | None],
) -> tuple[slice | int, ...]:
    """Python slices of a MIL slice: begin, end and stride, and masks.

    A mask set for an axis means: from the edge; to the edge; at `begin` only.
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


def check_indices(indices: Array, size: int) -> None:
    """Raise ValueError if an index is not in [0, size)."""
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise ValueError(
            f"indices go from {indices.min()} to {indices.max()}; expected 0 to {size - 1}"
        )
