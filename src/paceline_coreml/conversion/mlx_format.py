"""Dequantizes matrices in MLX's formats, with the bits of `mlx.core.dequantize`; needs no MLX.

A row is a stream of codes in 32-bit words, the lowest bits first; consecutive codes form groups:

    scales           bits per code       codes per group    weight
    floats           1 to 8, integers    usually 32 to 128  code * scale + bias ("affine")
    uint8, powers    4 or 8, floats      32                 code * scale ("mxfp4", "mxfp8")
    uint8, floats    4, floats           16                 code * scale ("nvfp4")
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = ("F16", "BF16", "F32", "F64")
"""Types of unquantized tensors, as safetensors names them."""

_NVFP4 = (4, 16)
_FLOAT_CODES = ((4, 32), (8, 32), _NVFP4)

_HALF_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1 = torch.cat([_HALF_E2M1, -_HALF_E2M1])
"""The float of every 4-bit code."""

_CHUNK = 1 << 22
"""Weights to unpack at once."""


class Stored(NamedTuple):
    """The type and shape of a tensor in a safetensors file."""

    kind: str
    shape: tuple[int, ...]


class Packing(NamedTuple):
    bits: int
    group: int


def packing_of(
    shape: tuple[int, ...], words: Stored, scales: Stored, biases: Stored | None
) -> Packing | None:
    """Return how MLX stored a matrix of this shape, or None if that is not a format of MLX."""
    if not all(len(one) == 2 and all(one) for one in (shape, words.shape, scales.shape)):
        return None
    rows, columns = shape
    packing = Packing(32 * words.shape[1] // columns, columns // scales.shape[1])
    bits, group = packing
    is_exact = (bits * columns, group * scales.shape[1]) == (32 * words.shape[1], columns)
    has_rows = words.kind == "U32" and words.shape[0] == scales.shape[0] == rows
    if biases is None:
        is_known = scales.kind == "U8" and packing in _FLOAT_CODES
    else:
        is_known = scales == biases and scales.kind in FLOATS and bits <= 8 and group % 8 == 0
    return packing if is_exact and has_rows and is_known else None


def dequantize(words: Tensor, scales: Tensor, biases: Tensor | None, packing: Packing) -> Tensor:
    """Compute weights [rows, columns] in float32, rounded like MLX's.

    `words` is [rows, columns * bits / 32]; `scales` and `biases` are [rows, columns / group].
    """
    rows, groups = scales.shape
    columns = groups * packing.group
    out = torch.empty(rows, columns)
    step = max(1, _CHUNK // columns)
    for chunk in (slice(at, at + step) for at in range(0, rows, step)):
        codes = _unpacked(words[chunk], packing.bits).view(-1, groups, packing.group)
        scale = scales[chunk, :, None]
        if biases is not None:
            weights = codes.to(scale.dtype) * scale + biases[chunk, :, None]
        else:
            kind = torch.float8_e4m3fn if packing == _NVFP4 else torch.float8_e8m0fnu
            floats = _E2M1[codes.int()] if packing.bits == 4 else codes.view(torch.float8_e4m3fn)
            weights = floats.float() * scale.view(kind).float()
        out[chunk] = weights.flatten(1)
    return out


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words [rows, n], uint8 [rows, n / bits * 4, 8]."""
    # Eight codes fill as many bytes as one has bits.
    eight = torch.zeros(len(words), words.shape[1] * 4 // bits, 8, dtype=torch.uint8)
    eight[..., :bits] = words.view(torch.uint8).view(*eight.shape[:2], bits)
    codes = torch.empty_like(eight)
    for index in range(8):
        codes[..., index] = (eight.view(torch.int64)[..., 0] >> index * bits) & (2**bits - 1)
    return codes
