"""Operations that multiply matrices: 1x1 convolutions and matmul.

Each arranges its operands as vectors and calls `dots`. Invariant, from `dots`: a result depends
only on its two vectors.
"""

from paceline_coreml.rehearsal.ops.products import dots
from paceline_coreml.rehearsal.ops.table import Array, Ints, op


@op("conv", pad_type=("valid", "custom"))
def _conv(
    x: Array,
    weight: Array,
    *,
    pad_type: str = "valid",
    bias: Array | None = None,
    strides: Ints | None = None,
    pad: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Array:
    """Convolve x [N, C, ...] with weight [O, C / groups, 1, ...]; return [N, O, ...]."""
    batch, channels, *places = x.shape
    if weight[0].size * groups != channels or {*(strides or ())} - {1} or any(pad or ()):
        raise ValueError(
            f"kernel {list(weight.shape)} with strides {strides} and pad {pad} on "
            f"{list(x.shape)}; expected a 1x1 convolution"
        )
    rows = x.reshape(batch, groups, channels // groups, -1).swapaxes(2, 3)
    filters = weight.reshape(groups, len(weight) // groups, -1)
    out = dots(filters, rows).reshape(batch, len(weight), *places)
    return out if bias is None else out + bias.reshape(-1, *(1,) * (x.ndim - 2))


@op("matmul")
def _matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    """Multiply x [..., M, K] by y [..., K, N]; leading axes broadcast as in numpy."""
    return dots(x.swapaxes(-1, -2) if transpose_x else x, y if transpose_y else y.swapaxes(-1, -2))
