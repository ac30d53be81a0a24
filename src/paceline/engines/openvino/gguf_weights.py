"""Rewrites weights with fractional zero points so that OpenVINO's fast kernel takes them, exactly.

Q4_1, Q4_K and Q5_K have an offset for each 32 weights: a weight is s (q - z), with codes q and a
zero point z = offset / s that is no whole number. The compressed kernel wants whole ones. So

    x W = x [s (q - round z)] + g(x) [s (round z - z)],

where g(x) are the sums of x over the 32 inputs of each group: a second product, 1/32 as large,
whose weights are small and are stored in 8 bits. docs/decisions/gguf-weights.md has the figures.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.storage.int8 import as_int8


class _Groups(NamedTuple):
    """A matrix [out, groups, group] of codes, as the frontend stores it."""

    codes: Any
    """Constant node."""
    scale: npt.NDArray[np.float32]
    """[out, groups, 1]"""
    zero: npt.NDArray[np.float32]
    """[out, groups, 1]"""


def exact_zero_points(model: Any) -> None:
    """Rewrite all such matrices of `model` that are the weights of a product."""
    sums: dict[tuple[str, int, int], Any] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and (found := _groups(node.input_value(1))):
            _rewrite(node, found, sums)


def _groups(output: Any) -> _Groups | None:
    """The matrix behind a product's second input, if its zero points are fractional."""
    node = output.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Reshape":
        return None
    multiply = node.input_value(0).get_node()
    if multiply.get_type_name() != "Multiply":
        return None
    subtract = multiply.input_value(0).get_node()
    if subtract.get_type_name() != "Subtract":
        return None
    codes = subtract.input_value(0).get_node().input_value(0).get_node()
    zero, scale = (_constant(each.input_value(1)) for each in (subtract, multiply))
    if codes.get_type_name() != "Constant" or zero is None or scale is None:
        return None
    return None if (zero == np.rint(zero)).all() else _Groups(codes, scale, zero)


def _constant(output: Any) -> npt.NDArray[np.float32] | None:
    node = output.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        return None
    values: npt.NDArray[np.float32] = node.get_data().astype(np.float32)
    return values


def _rewrite(product: Any, found: _Groups, sums: dict[tuple[str, int, int], Any]) -> None:
    from openvino import opset13

    codes, scale, zero = found
    out, groups, size = (int(each) for each in codes.get_output_shape(0))
    whole = np.rint(zero)
    # What rounding moved, beyond the range of the codes too, is in the second product.
    kind = codes.get_element_type()
    low, high = (-128, 127) if kind.get_type_name() == "i8" else (0, 2**kind.bitwidth - 1)
    whole = whole.clip(low, high)
    zeros = opset13.convert(_typed(whole, kind), np.float16)
    steps = opset13.subtract(opset13.convert(codes, np.float16), zeros)
    values = opset13.multiply(steps, opset13.constant(scale.astype(np.float16)))
    shape = np.array([out, groups * size])
    weights = opset13.convert(opset13.reshape(values, shape, False), np.float32)
    given = product.input_value(0)
    key = (given.get_node().get_name(), given.get_index(), size)
    if key not in sums:
        split = opset13.reshape(given, np.array([0, 0, -1, groups, size]), True)
        sums[key] = opset13.reduce_mean(split, np.array([4]), False)
    moved = as_int8((size * scale * (whole - zero)).reshape(out, groups))
    first = opset13.matmul(given, weights, False, True)
    second = opset13.matmul(sums[key], moved, False, True)
    product.output(0).replace(opset13.add(first, second).output(0))


def _typed(values: npt.NDArray[np.float32], kind: Any) -> Any:
    """A constant of whole numbers in the type `kind`."""
    import openvino as ov
    from openvino import opset13

    whole = values.astype(np.int8).reshape(-1)
    if kind.bitwidth == 8:
        return opset13.constant(whole.reshape(values.shape), dtype=kind)
    tensor = ov.Tensor(kind, ov.Shape(values.shape))
    nibbles = np.append(whole, np.zeros(whole.size % 2, np.int8)).astype(np.uint8)
    tensor.data.reshape(-1)[:] = nibbles[0::2] | nibbles[1::2] << 4
    return opset13.constant(tensor)
