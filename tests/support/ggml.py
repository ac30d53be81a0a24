"""Weights of types that gguf-py only reads, quantized by the library of the engine llamacpp."""

import ctypes

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


def quantize(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """[rows, width] float32 -> [rows, bytes of a row] uint8."""
    from ik_llama_cpp import _ctypes_api as api

    function = api._lib.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    values = np.ascontiguousarray(values, np.float32)
    rows, width = values.shape
    group, size = GGML_QUANT_SIZES[kind]
    blocks = np.zeros((rows, width // group * size), np.uint8)
    written = function(int(kind), values.ctypes.data, blocks.ctypes.data, 0, rows, width, None)
    assert written == blocks.nbytes
    return blocks
