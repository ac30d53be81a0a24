"""8 bits per output channel, symmetric: the one form of weights that paceline stores itself."""

from typing import Any

import numpy as np
import numpy.typing as npt

_MOST = 127  # -128 is left out, so that the range is symmetric


def as_int8(weight: npt.NDArray[np.float32]) -> Any:
    """An OpenVINO node for a matrix [out, in] float32, kept as int8 with a scale for each row.

    Each row w becomes round(w / s) with s = max |w| / 127, kept as f16.
    """
    from openvino import opset13

    scale = np.abs(weight).max(axis=1, keepdims=True) / _MOST
    # As it will be stored; a row of zeros, or too small for f16, gets any scale.
    scale = np.where(scale < np.finfo(np.float16).tiny, 1, scale).astype(np.float16)
    whole = np.rint(weight / scale.astype(np.float32)).clip(-_MOST, _MOST).astype(np.int8)
    small = opset13.convert(opset13.constant(whole), np.float16)
    return opset13.convert(opset13.multiply(small, opset13.constant(scale)), np.float32)
