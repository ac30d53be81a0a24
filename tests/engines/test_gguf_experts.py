"""Products with the matrices of chosen experts, which keep their bits in the compiled graph."""

import numpy as np
import pytest

from paceline.engines.openvino.experts import ExpertProducts
from paceline.engines.openvino.gguf_matrix import matrix
from paceline.storage.gguf_file import Tensor
from paceline.storage.openvino import core

EXPERTS, ROWS, CHOSEN, OUT, IN = 4, 5, 2, 64, 256


def stored(kind: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    rng = np.random.default_rng(0)
    number = GGMLQuantizationType[kind]
    if kind == "Q4_K":
        blocks = rng.integers(0, 256, (EXPERTS, OUT, 144), dtype=np.uint8)
        blocks[..., :4] = np.array([0.01, 0.01], np.float16).view(np.uint8)
        blocks[..., 4:16] |= 0x55  # no scale is 0
        return Tensor("w", (EXPERTS, OUT, IN), int(number), blocks)
    values = rng.normal(0, 1, (EXPERTS, OUT, IN)).astype(np.float32)
    return Tensor("w", values.shape, int(number), quantize(values, number).view(np.uint8))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K"])
def test_each_row_is_multiplied_with_the_experts_that_it_chose(kind: str):
    import openvino as ov
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from openvino import opset13

    tensor = stored(kind)
    rows = opset13.parameter([1, -1, IN], np.float32)
    chosen = opset13.parameter([-1, CHOSEN], np.int32)
    result = ExpertProducts(1).product(rows.output(0), matrix(tensor), chosen.output(0))
    options = {"PERF_COUNT": "YES", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core().compile_model(ov.Model([result], [rows, chosen]), "CPU", options)
    request = compiled.create_infer_request()
    rng = np.random.default_rng(1)
    inputs = rng.normal(0, 1, (1, ROWS, IN)).astype(np.float32)
    choice = rng.integers(0, EXPERTS, (ROWS, CHOSEN)).astype(np.int32)
    products = request.infer([inputs, choice])[0]

    values = dequantize(tensor.data, GGMLQuantizationType(tensor.kind)).reshape(tensor.shape)
    expected = np.einsum("nkoi,ni->kno", values[choice], inputs[0])
    assert np.abs(products - expected).max() < 1e-3 * np.abs(expected).max()
    kinds = {item.node_type for item in request.profiling_info}
    assert ("GatherMatmulCompressed" in kinds) == (kind != "F16")
