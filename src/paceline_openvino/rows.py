"""Whether a row's bits depend on the number of rows in a call, on this processor.

OpenVINO's kernel for compressed weights adds the products of a row in parts, and where the parts
end depends on the number of rows. Measured with 2026.4.1 on a CPU with AVX2 and without VNNI: up to
80 rows all give the same bits. With VNNI it does not depend on them.
"""

from functools import cache

import numpy as np

from paceline_openvino.library import core, openvino

MOST_ROWS = 64
"""Most rows of a call where it does."""


@cache
def rows_are_invariant() -> bool:
    """Whether, on this CPU, a row's bits are the same in calls of up to and above `MOST_ROWS`.

    Runs one product with 8-bit weights and a scale per output, as exported models have them.
    """
    ov = openvino()
    from openvino import opset13

    rng = np.random.default_rng(0)
    inputs, outputs = 576, 64
    rows = opset13.parameter([-1, inputs], np.float32)
    codes = opset13.constant(rng.integers(-127, 128, (outputs, inputs)).astype(np.int8))
    scales = opset13.constant(rng.uniform(0.01, 0.02, (outputs, 1)).astype(np.float16))
    weights = opset13.multiply(opset13.convert(codes, np.float16), scales)
    products = opset13.matmul(rows, opset13.convert(weights, np.float32), False, True)
    options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32"}
    model = ov.Model([opset13.result(products)], [rows])
    request = core().compile_model(model, "CPU", options).create_infer_request()
    values = rng.normal(size=(3 * MOST_ROWS, inputs)).astype(np.float32)
    few, many = (request.infer([values[:n].copy()])[0][:2].copy() for n in (2, len(values)))
    return bool((few == many).all())
