"""Constants, and the operations that decode stored weights: quantized and palettized.

They run once, when a package is opened. Results are float32; the caller rounds them to the declared
type.
"""

import numpy as np

from paceline_coreml.rehearsal.ops.table import Array, op


@op("const", moves=True)
def _const(val: Array) -> Array:
    return val


@op("constexpr_blockwise_shift_scale")
def _blockwise_scale(data: Array, scale: Array) -> Array:
    """Multiply data by scale, with one scale per block of the data."""
    numbers = data.astype(np.float32)
    for axis, size in enumerate(data.shape):
        if scale.shape[axis] not in (1, size):
            scale = np.repeat(scale, size // scale.shape[axis], axis)
    numbers *= scale
    return numbers


@op("constexpr_lut_to_dense")
def _lut_to_dense(indices: Array, lut: Array) -> Array:
    """Look up values, with one table of numbers per block of indices.

    indices: [...], lut: [tables per axis ..., numbers, 1].
    """
    # The table of every index, per axis; they broadcast to the indices' shape.
    where = np.ix_(
        *(
            np.arange(size) // (size // count)
            for size, count in zip(indices.shape, lut.shape[:-2], strict=True)
        )
    )
    values: Array = lut[(*where, indices)][..., 0]
    return values
