"""Operations that multiply matrices: convolution, linear layers, matmul, attention, einsum.

Each arranges its operands as vectors and calls `dots`. Invariant, from `dots`: a result depends on
its two vectors alone.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline_coreml.rehearsal.ops.products import dots
from paceline_coreml.rehearsal.ops.reductions import softmax
from paceline_coreml.rehearsal.ops.table import Array, Ints, op


def _fault_of_conv(arguments: Mapping[str, Any]) -> str | None:
    pad_type, strides = arguments.get("pad_type", "valid"), arguments.get("strides", ())
    if pad_type == "custom" and "pad" not in arguments:
        return "the pad_type custom, and no pad"
    if pad_type.startswith("same") and any(step != 1 for step in strides):
        # MIL's documentation and its shape inference disagree here.
        return f"the pad_type {pad_type} with strides {list(strides)}, expected strides of 1"
    return None


@op(
    "conv",
    rejects=_fault_of_conv,
    pad_type=("valid", "custom", "same", "same_lower"),
)
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
    """x: [N, C, ...], weight: [O, C / groups, ...]; returns [N, O, ...]."""
    axes = x.ndim - 2
    strides, dilations = strides or (1,) * axes, dilations or (1,) * axes
    bias = None if bias is None else bias.reshape(-1, *(1,) * axes)
    if weight[0].size == x.shape[1] and set(strides) == {1} and not any(pad or ()):
        rows = x.reshape(*x.shape[:2], -1).swapaxes(1, 2)  # a 1x1 convolution: no windows
        out = dots(weight.reshape(len(weight), -1), rows).reshape(len(x), -1, *x.shape[2:])
        return out if bias is None else out + bias
    extent = [(size - 1) * step + 1 for size, step in zip(weight.shape[2:], dilations, strict=True)]
    x = np.pad(x, [(0, 0), (0, 0), *_padding(pad_type, pad or (), extent)])
    # [N, C, positions ..., kernel ...], without a copy
    windows = np.lib.stride_tricks.sliding_window_view(x, extent, tuple(range(2, x.ndim)))
    every = tuple(slice(None, None, step) for step in (*strides, *dilations))
    windows = windows[(slice(None), slice(None), *every)]
    batch, channels, *positions = windows.shape[: x.ndim]
    filters = weight.reshape(groups, len(weight) // groups, -1)
    patches = windows.reshape(batch, groups, channels // groups, math.prod(positions), -1)
    patches = patches.transpose(0, 1, 3, 2, 4).reshape(batch, groups, math.prod(positions), -1)
    out = dots(filters, patches).reshape(batch, len(weight), *positions)
    return out if bias is None else out + bias


def _padding(pad_type: str, pad: Ints, extent: list[int]) -> list[tuple[int, int]]:
    """Zeros before and after, per axis."""
    if pad_type == "custom":
        return list(zip(pad[::2], pad[1::2], strict=True))
    if pad_type == "valid":
        return [(0, 0)] * len(extent)
    less = [(size - 1) // 2 for size in extent]
    more = [size - 1 - half for size, half in zip(extent, less, strict=True)]
    before, after = (less, more) if pad_type == "same" else (more, less)
    return list(zip(before, after, strict=True))


@op("linear")
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x: [..., K], weight: [N, K]; returns [..., N]."""
    rows = np.atleast_2d(x).reshape(-1, x.shape[-1])
    out = dots(rows, weight).reshape(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


@op("matmul")
def _matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    """x: [..., M, K] or [K], y: [..., K, N]; leading axes broadcast, as numpy's do."""
    a = x[None] if x.ndim == 1 else x.swapaxes(-1, -2) if transpose_x else x
    b = y if transpose_y else y.swapaxes(-1, -2)
    out = dots(a, b)
    return out[..., 0, :] if x.ndim == 1 else out


@op("scaled_dot_product_attention")
def _attention(query: Array, key: Array, value: Array, attn_mask: Array | None = None) -> Array:
    """query: [..., L, E], key: [..., S, E], value: [..., S, V]; returns [..., L, V]."""
    scores = dots(query, key) / np.float32(math.sqrt(query.shape[-1]))
    if attn_mask is not None and attn_mask.dtype == np.bool_:
        scores = np.where(attn_mask, scores, -np.float32(np.inf))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return dots(softmax(scores), value.swapaxes(-1, -2))


def _fault_of_einsum(arguments: Mapping[str, Any]) -> str | None:
    equation = arguments.get("equation", "")
    parts = equation.replace("->", ",").replace(" ", "").split(",")
    if len(parts) == 3 and all(len(part) in (3, 4) for part in parts):
        left, right, out = parts
        summed = left[-1] == right[-3] and left[-2] == right[-2] and left[:-3] == right[:-3]
        if summed and out == left[:-1] + right[-1]:
            return None
    return f"the equation {equation!r}, expected one like nchw,nwhu->nchu"


@op("einsum", rejects=_fault_of_einsum)
def _einsum(values: tuple[Array, ...], equation: str) -> Array:
    """MIL's only form: [..., C, H, W] with [..., W, H, U] gives [..., C, H, U]."""
    x, y = values
    rows = x.swapaxes(-2, -3)  # [..., H, C, W]
    columns = np.moveaxis(y, -3, -1)  # [..., H, U, W]
    return dots(rows, columns).swapaxes(-2, -3)
