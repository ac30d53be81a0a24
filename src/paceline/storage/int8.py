"""Symmetric int8 weights, one scale per output channel."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_MAX = 127  # -128 is unused, so that the range is symmetric


class Int8Matrix(NamedTuple):
    """A matrix [out, in] whose row w is round(w / s), with s = max |w| / 127."""

    whole: npt.NDArray[np.int8]
    """[out, in]"""
    scale: npt.NDArray[np.float16]
    """[out, 1]"""

    def floats(self) -> npt.NDArray[np.float32]:
        """[out, in]; quantized again they give the same."""
        floats: npt.NDArray[np.float32] = self.whole.astype(np.float32)
        floats *= self.scale.astype(np.float32)
        return floats


def as_int8(weight: npt.NDArray[np.float32]) -> Any:
    """OpenVINO node of a matrix [out, in] float32, stored as `quantized` has it."""
    from openvino import opset13

    whole, scale = quantized(weight)
    small = opset13.convert(opset13.constant(whole), np.float16)
    return opset13.convert(opset13.multiply(small, opset13.constant(scale)), np.float32)


def quantized(weight: npt.NDArray[np.float32]) -> Int8Matrix:
    """A matrix in int8."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / _MAX
    # Rounded to f16 as stored; rows of zeros, or too small for f16, get the scale 1.
    scale = np.where(scale < np.finfo(np.float16).tiny, 1, scale).astype(np.float16)
    whole = np.rint(weight / scale.astype(np.float32)).clip(-_MAX, _MAX).astype(np.int8)
    return Int8Matrix(whole, scale)
