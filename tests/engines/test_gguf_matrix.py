"""Weights of graphs that are built here: the values of gguf-py, in every type that is opened."""

import numpy as np
import pytest

from paceline.engines.openvino.gguf_matrix import matrix
from paceline.models.gguf.support import WEIGHTS
from paceline.storage.gguf_file import Tensor
from paceline.storage.openvino import core

KEPT = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
OUT, IN = 6, 512


def stored(kind: str, *rows: int) -> Tensor:
    """Random bits with scales of about 0.01."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    rng = np.random.default_rng(0)
    number = GGMLQuantizationType[kind]
    shape = (*rows, IN)
    if kind in KEPT:
        data = quantize(rng.normal(0, 1, shape).astype(np.float32), number).view(np.uint8)
        return Tensor("w", shape, int(number), data)
    block, size = GGML_QUANT_SIZES[number]
    data = rng.integers(0, 256, (*rows, IN // block, size), dtype=np.uint8)
    scale = rng.uniform(0.005, 0.02, (*rows, IN // block)).astype(np.float16).view(np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
    both = ("Q4_1", "Q4_K", "Q5_1", "Q5_K")
    for at in places.get(kind, (0, 2) if kind in both else (0,)):
        data[..., at : at + 2] = scale.reshape(*rows, IN // block, 2)
    if kind == "Q4_K":  # a group whose scale is 0 needs the second product of gguf_weights
        data[..., 4:16] |= 0x55
    if kind == "MXFP4":
        data[..., 0] = 120
    return Tensor("w", shape, int(number), data.reshape(*rows, -1))


def values(tensor: Tensor) -> np.ndarray:
    import openvino as ov

    model = ov.Model([matrix(tensor)], [])
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    return core().compile_model(model, "CPU", options)([])[0]


def expected(tensor: Tensor) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = dequantize(tensor.data, GGMLQuantizationType(tensor.kind))
    return rows.reshape(tensor.shape)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("experts", [(), (3,)])
def test_a_matrix_has_the_values_of_its_gguf_type(kind: str, experts: tuple[int, ...]):
    tensor = stored(kind, *experts, OUT)
    true = expected(tensor)
    rows = values(tensor)
    assert rows.shape == true.shape
    if kind in KEPT:
        np.testing.assert_allclose(rows, true, rtol=1e-3)
    else:
        # Each group of 32 in 8 bits; Q4_K's zero points, before they are made exact, in float16.
        largest = np.abs(true).reshape(-1, 32).max(axis=1)
        error = np.abs(rows - true).reshape(-1, 32).max(axis=1)
        assert (error <= largest / 127).all()
