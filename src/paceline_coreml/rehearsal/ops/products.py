"""Sums of products, for 1x1 convolutions and matmul: one function multiplies all matrices.

Why rows are independent: each number of a product is the dot product of two contiguous vectors,
computed by a separate call (`vecdot` calls BLAS's `sdot` once per pair). The number and position of
the vectors do not matter. A matrix-vector or matrix-matrix routine would get the whole block, and
may choose its kernel, and thus its order of summation, by the number of rows.

Short vectors are summed term by term, which is also independent, and fast for many such vectors (a
write of T rows into S slots is a product over T). A one-hot row is exact on either path for every
T: adding zeros does not round.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import numpy as np

from paceline_coreml.rehearsal.ops.table import Array, Ints, op
from paceline_coreml.rehearsal.rounding import to_half

SHORT: Final = 16
"""Maximum terms of a vector that is summed term by term."""

GROUP: Final = 32
"""Terms added in float32 where sums are in float16; the devices' number is not known."""

_HALF_SUMS: ContextVar[bool] = ContextVar("half_sums", default=False)


@contextmanager
def half_sums(*, on: bool) -> Iterator[None]:
    """Add sums of groups of terms in float16 within the context, if `on`."""
    token = _HALF_SUMS.set(on)
    try:
        yield
    finally:
        _HALF_SUMS.reset(token)


def grouped(x: Array) -> Array | None:
    """Split [..., K] into [..., groups, GROUP], padded with zeros; None if sums are in float32."""
    terms = x.shape[-1]
    if terms <= GROUP or x.dtype != np.float32 or not _HALF_SUMS.get():
        return None
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -terms % GROUP)]
    # If an array is in Fortran order, numpy's padded one is also.
    return np.ascontiguousarray(np.pad(x, padding).reshape(*x.shape[:-1], -1, GROUP))


def added(sums: Array) -> Array:
    """Sum over the last axis in float16, one term after another."""
    parts = to_half(sums)
    total = parts[..., 0]
    for group in range(1, parts.shape[-1]):
        total = to_half(total + parts[..., group])
    return total


def dots(a: Array, b: Array) -> Array:
    """Compute the dot product of every vector of `a` with every vector of `b`.

    a: [..., M, K], b: [..., N, K], leading axes broadcast; returns [..., M, N].
    """
    terms = a.shape[-1]
    if terms != b.shape[-1]:
        raise ValueError(f"cannot multiply vectors with {terms} and {b.shape[-1]} numbers")
    groups, others = grouped(a), grouped(b)
    if groups is not None and others is not None:
        return added(np.vecdot(groups[..., :, None, :, :], others[..., None, :, :, :]))
    if terms > SHORT:
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        # Read the matrix with more vectors only once.
        if a.shape[-2] >= b.shape[-2]:
            products: Array = np.vecdot(a[..., :, None, :], b[..., None, :, :])
        else:
            products = np.vecdot(a[..., None, :, :], b[..., :, None, :]).swapaxes(-1, -2)
        return products
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = np.zeros((*shape, a.shape[-2], b.shape[-2]), np.result_type(a, b))
    for term in range(terms):
        total += a[..., :, None, term] * b[..., None, :, term]
    return total


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
