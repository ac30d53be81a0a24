"""Rewrites weights in the forms that OpenVINO's fast kernel takes.

Q4_1, Q4_K and Q5_K have an offset for each 32 weights: a weight is s (q - z), with codes q and a
zero point z = offset / s that is no whole number. The compressed kernel wants whole ones. So

    x W = x [s (q - round z)] + g(x) [s (round z - z)],

where g(x) are the sums of x over the 32 inputs of each group: a second product, 1/32 as large,
whose weights are small and are stored in 8 bits. docs/decisions/gguf-weights.md has the figures.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.storage.gguf_file import GgufFile, Tensor

Floats = npt.NDArray[np.float32]

_ROWS_AT_ONCE = 4096
WEIGHT = "weight.weight_"
"""Begins the names of the frontend's nodes of weights; the rest is the tensor's name."""


class _Groups(NamedTuple):
    """A matrix [out, groups, group] of codes, as the frontend stores it."""

    codes: Any
    """Constant node."""
    scale: Floats
    """[out, groups, 1]"""
    offset: Floats
    """[out, groups, 1]: the weights are scale * codes - offset."""


def exact_zero_points(model: Any, file: GgufFile) -> None:
    """Rewrite all such matrices of `model`, made of `file`, that are the weights of a product."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    sums: dict[tuple[str, int, int], Any] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and (found := _groups(node.input_value(1), tensors)):
            _rewrite(node, found, sums)


def regroup_six_bits(model: Any) -> None:
    """Store Q6_K, which has groups of 16, in 8 bits and groups of 32, which the fast kernel takes.

    A weight moves by less than 1/8 of its own step.
    """
    for node in model.get_ordered_ops():
        if node.get_friendly_name().startswith(WEIGHT) and node.get_type_name() == "Reshape":
            multiply = node.input_value(0).get_node()
            convert = multiply.input_value(0).get_node()
            if multiply.get_type_name() != "Multiply" or convert.get_type_name() != "Convert":
                continue
            codes, scale = convert.input_value(0).get_node(), _constant(multiply.input_value(1))
            shape = [int(each) for each in codes.get_output_shape(0)]
            if scale is not None and len(shape) == 3 and shape[2] == 16 and shape[1] % 2 == 0:
                node.output(0).replace(_as_groups_of_32(codes.get_data(), scale).output(0))


def _as_groups_of_32(codes: npt.NDArray[np.int8], scale: Floats) -> Any:
    """A matrix [out, groups of 16, 16] of 6-bit codes, with scales [out, groups, 1]."""
    from openvino import opset13

    out, groups, size = codes.shape
    ends = np.maximum(codes.max(axis=2), -codes.min(axis=2).astype(np.int16))
    largest = (ends * np.abs(scale[..., 0])).reshape(out, groups // 2, 2).max(axis=2)
    step = np.maximum(largest / 127, np.finfo(np.float16).tiny).astype(np.float16)
    ratio = scale.reshape(out, groups // 2, 2, 1) / step[..., None, None].astype(np.float32)
    whole = np.empty((out, groups // 2, 2 * size), np.int8)
    for at in range(0, out, _ROWS_AT_ONCE):
        rows = slice(at, at + _ROWS_AT_ONCE)
        old = codes[rows].reshape(-1, groups // 2, 2, size)
        whole[rows] = np.rint(old * ratio[rows]).clip(-127, 127).reshape(whole[rows].shape)
    values = opset13.convert(opset13.constant(whole), np.float16)
    values = opset13.multiply(values, opset13.constant(step[..., None]))
    return opset13.convert(
        opset13.reshape(values, np.array([out, groups * size]), False), np.float32
    )


def _groups(output: Any, tensors: Mapping[str, Tensor]) -> _Groups | None:
    """The matrix behind a product's second input, if its zero points are fractional."""
    node = output.get_node()
    tensor = tensors.get(node.get_friendly_name().removeprefix(WEIGHT))
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
    if (zero == np.rint(zero)).all():
        return None
    # A group of equal weights has the scale 0, and no zero point.
    exact = _offsets(tensor) if tensor is not None else None
    return _Groups(codes, scale, scale * zero if exact is None else exact.reshape(scale.shape))


def _offsets(tensor: Tensor) -> Floats | None:
    """Offsets of a tensor's groups of 32 weights, in order; None for a type without offsets."""
    from gguf import GGMLQuantizationType
    from gguf.quants import Q4_K

    kind = GGMLQuantizationType(tensor.kind).name
    if kind in ("Q4_1", "Q5_1"):
        blocks = tensor.data.reshape(-1, {"Q4_1": 20, "Q5_1": 24}[kind])
        return -blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    if kind in ("Q4_K", "Q5_K"):
        blocks = tensor.data.reshape(-1, {"Q4_K": 144, "Q5_K": 176}[kind])
        step = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        found: Floats = step * Q4_K.get_scale_min(blocks[:, 4:16])[1]
        return found
    return None


def _constant(output: Any) -> Floats | None:
    node = output.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        return None
    values: Floats = node.get_data().astype(np.float32)
    return values


def _rewrite(product: Any, found: _Groups, sums: dict[tuple[str, int, int], Any]) -> None:
    from openvino import opset13

    codes, scale, offset = found
    out, groups, size = (int(each) for each in codes.get_output_shape(0))
    kind = codes.get_element_type()
    low, high = (-128, 127) if kind.get_type_name() == "i8" else (0, 2**kind.bitwidth - 1)
    # What rounding moves, beyond the range of the codes too, is in the second product.
    whole = np.rint(offset / np.where(scale == 0, np.inf, scale)).clip(low, high)
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
    moved = _in_eight_bits((size * (scale * whole - offset)).reshape(out, groups))
    first = opset13.matmul(given, weights, False, True)
    second = opset13.matmul(sums[key], moved, False, True)
    product.output(0).replace(opset13.add(first, second).output(0))


def _in_eight_bits(matrix: Floats) -> Any:
    """A small matrix [out, groups] in 8 bits with float32 scales: float16 would lose small ones."""
    from openvino import opset13

    step = np.maximum(np.abs(matrix).max(axis=1, keepdims=True) / 127, np.finfo(np.float32).tiny)
    codes = np.rint(matrix / step).astype(np.int8)
    values = opset13.convert(opset13.constant(codes), np.float32)
    return opset13.multiply(values, opset13.constant(step.astype(np.float32)))


def _typed(values: Floats, kind: Any) -> Any:
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
