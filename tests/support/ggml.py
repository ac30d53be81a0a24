"""Weights of types that gguf-py only reads, quantized by a library of the engine llamacpp."""

import ctypes

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.engines.llamacpp.binding import Binding

_ROWS = 32
"""Rows of the smallest types, whose codes take long to find: further ones repeat these."""


def quantize(
    binding: Binding, values: npt.NDArray[np.float32], kind: GGMLQuantizationType
) -> npt.NDArray[np.uint8]:
    if kind.name.startswith("IQ"):
        blocks = _quantized(binding, values[:_ROWS], kind)
        return np.resize(blocks, (len(values), blocks.shape[1]))
    return _quantized(binding, values, kind)


def _quantized(
    binding: Binding, values: npt.NDArray[np.float32], kind: GGMLQuantizationType
) -> npt.NDArray[np.uint8]:
    function = binding.library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    values = np.ascontiguousarray(values, np.float32)
    rows, width = values.shape
    group, size = GGML_QUANT_SIZES[kind]
    blocks = np.zeros((rows, width // group * size), np.uint8)
    matters = np.ones(width, np.float32)  # how much each input does, which some types must know
    data, target, importance = (array.ctypes.data for array in (values, blocks, matters))
    written = function(int(kind), data, target, 0, rows, width, importance)
    assert written == blocks.nbytes
    return blocks
