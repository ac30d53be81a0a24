"""Constants, and the operations that decode stored weights: quantized, palettized, sparse.

They run once, when a package is opened. Results are float32; the caller rounds them to the declared
type.
"""

import math

import numpy as np

from paceline_coreml.rehearsal.ops.table import Array, Ints, op
from paceline_coreml.rehearsal.weights import unpacked


@op("const", moves=True)
def _const(val: Array) -> Array:
    return val


@op("constexpr_cast", moves=True)
def _constexpr_cast(source_val: Array, output_dtype: str) -> Array:
    return source_val


@op("constexpr_blockwise_shift_scale")
def _blockwise_shift_scale(data: Array, scale: Array, offset: Array | None = None) -> Array:
    """(data - offset) * scale, with one offset and one scale per block of the data."""
    numbers = data.astype(np.float32)
    if offset is not None:
        numbers -= _spread(offset, data.shape)
    numbers *= _spread(scale, data.shape)
    return numbers


@op("constexpr_affine_dequantize")
def _affine_dequantize(quantized_data: Array, zero_point: Array, scale: Array, axis: int) -> Array:
    """(data - zero point) * scale, with one number in all or one per index of `axis`."""
    shape = [1] * quantized_data.ndim
    shape[axis] = -1
    numbers = quantized_data.astype(np.float32)
    numbers -= zero_point.reshape(shape).astype(np.float32)
    numbers *= scale.reshape(shape)
    return numbers


@op("constexpr_lut_to_dense")
def _lut_to_dense(
    indices: Array, lut: Array, shape: Ints | None = None, vector_axis: int | None = None
) -> Array:
    """Table lookup; see the two forms below."""
    if shape is not None:
        return _packed_lut(indices, lut, shape)
    return _blockwise_lut(indices, lut, vector_axis)


def _packed_lut(indices: Array, lut: Array, shape: Ints) -> Array:
    """IOS 16: one table, and indices packed into bytes."""
    bits = int(lut.size - 1).bit_length()
    values = unpacked(indices, f"uint{bits}", math.prod(shape))
    return np.take(lut, values).reshape(shape)


def _blockwise_lut(indices: Array, lut: Array, vector_axis: int | None) -> Array:
    """IOS 18: one table per block of indices, of numbers or of vectors.

    indices: [...], lut: [tables per axis ..., numbers, vector].
    """
    *tables, _, width = lut.shape
    # Per axis the table of every index; they broadcast to the indices' shape.
    where = np.ix_(
        *(
            np.arange(size) // (size // count)
            for size, count in zip(indices.shape, tables, strict=True)
        )
    )
    values: Array = lut[(*where, indices)]  # [..., vector]
    if width == 1 and vector_axis is None:
        return values[..., 0]
    if vector_axis is None:
        raise ValueError(f"the table holds vectors of {width}, and there is no vector_axis")
    axis = vector_axis % indices.ndim
    out = list(indices.shape)
    out[axis] *= width
    return np.moveaxis(values, -1, axis + 1).reshape(out)


@op("constexpr_sparse_to_dense")
def _sparse_to_dense(nonzero_data: Array, mask: Array, shape: Ints | None = None) -> Array:
    """The data where the mask is set, else 0. iOS 16 gives a mask packed into bytes and a shape."""
    if shape is not None:
        mask = unpacked(mask, "uint1", math.prod(shape)).reshape(shape)
    dense = np.zeros(mask.shape, nonzero_data.dtype)
    dense[mask != 0] = nonzero_data
    return dense


def _spread(blocks: Array, shape: Ints) -> Array:
    """Each number repeated over its block."""
    for axis, size in enumerate(shape):
        if blocks.shape[axis] not in (1, size):
            blocks = np.repeat(blocks, size // blocks.shape[axis], axis)
    return blocks.astype(np.float32)
