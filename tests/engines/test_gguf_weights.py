"""Forms in which weights of a GGUF file reach the kernel."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from openvino import Model, opset13

from paceline.engines.openvino.gguf_weights import WEIGHT, regroup_six_bits
from paceline.storage.openvino import core

OUT, GROUPS = 80, 64


def six_bits(codes: Any, scale: npt.NDArray[np.float16], name: str) -> Any:
    """Weights of Q6_K as the frontend makes them of a constant [out, groups, 16]."""
    values = opset13.multiply(opset13.convert(codes, np.float16), opset13.constant(scale))
    shape = np.array([scale.shape[0], -1])
    return opset13.reshape(values, shape, False, name=WEIGHT + name)


def model_of(weights: list[Any]) -> Any:
    parameter = opset13.parameter([-1, GROUPS * 16], np.float32, name="x")
    products = [
        opset13.matmul(parameter, opset13.convert(rows, np.float32), False, True)
        for rows in weights
    ]
    return Model(products, [parameter])


def codes_of(product: Any) -> Any:
    """The constant that a product reads through conversions, scales and shapes."""
    node = product.input_value(1).get_node()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    return node


def weights_of(model: Any) -> list[npt.NDArray[np.float32]]:

    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = core().compile_model(model, "CPU", exact)
    result = compiled({"x": np.eye(GROUPS * 16, dtype=np.float32)})
    return [result[port].T.copy() for port in compiled.outputs]


@pytest.fixture
def numbers() -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    rng = np.random.default_rng(0)
    scale = rng.normal(0, 0.01, (OUT, GROUPS, 1)).astype(np.float16)
    scale[3], scale[5] = 0, 6e-8  # a group of zeros, and the smallest scale
    return rng.integers(-32, 32, (OUT, GROUPS, 16), dtype=np.int8), scale


def test_q6_k_in_groups_of_32_moves_a_weight_by_an_eighth_of_a_step(
    numbers: tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]],
):
    codes, scale = numbers
    exact = (codes * scale.astype(np.float32)).reshape(OUT, -1)
    model = model_of([six_bits(opset13.constant(codes), scale, "a.weight")])
    regroup_six_bits(model)
    largest = np.abs(scale.astype(np.float32)).reshape(OUT, -1, 2).max(axis=2)
    (weights,) = weights_of(model)
    moved = np.abs(weights - exact).reshape(OUT, -1, 32).max(axis=2)
    assert (moved <= largest * (0.126 + 32 * 2**-11) + 1e-5).all()
    assert moved.max() > 0, "this would be no check"


def test_q6_k_is_regrouped_in_the_frontends_memory(
    numbers: tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]],
):
    codes, scale = numbers
    constant = opset13.constant(codes)
    address = constant.get_data().ctypes.data
    model = model_of([six_bits(constant, scale, "a.weight")])
    regroup_six_bits(model)
    (result,) = model.get_results()
    regrouped = codes_of(result.input_value(0).get_node())
    assert regrouped.get_data().ctypes.data == address
    assert list(regrouped.get_output_shape(0)) == [OUT, GROUPS // 2, 32]


def test_codes_that_two_weights_share_are_regrouped_once_each(
    numbers: tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]],
):
    from openvino.op import Constant

    codes, scale = numbers
    alone = model_of([six_bits(opset13.constant(codes), scale, "a.weight")])
    regroup_six_bits(alone)
    buffer = codes.copy()
    views = [Constant(buffer, shared_memory=True) for _ in range(2)]
    both = model_of(
        [
            six_bits(view, scale, name)
            for view, name in zip(views, ("a.weight", "b.weight"), strict=True)
        ]
    )
    regroup_six_bits(both)
    (expected,) = weights_of(alone)
    assert all(np.array_equal(item, expected) for item in weights_of(both))
