"""Rewrites weights in the forms that OpenVINO's fast kernel takes.

Q4_1, Q4_K and Q5_K have an offset per 32 weights: a weight is s (q - z), with codes q and a
zero point z = offset / s that is no whole number. The compressed kernel wants whole ones. So

    x W = x [s (q - round z)] + g(x) [s (round z - z)],

where g(x) are the sums of x over the 32 inputs of a group: a second product, 1/32 as large,
whose weights are small and are stored in 8 bits. docs/decisions/gguf-weights.md has the figures.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.storage.gguf_file import GgufFile, Tensor

Floats = npt.NDArray[np.float32]

_WEIGHTS_AT_ONCE = 1 << 16
"""As float32 they fit into a core's own cache."""

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
    """Rewrite all such matrices of `model`, read from `file`, that are the weights of a product."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    sums: dict[tuple[str, int, int], Any] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and (matrix := _groups(node.input_value(1), tensors)):
            _rewrite(node, matrix, sums)


def regroup_six_bits(model: Any) -> None:
    """Store Q6_K, which has groups of 16, in 8 bits and groups of 32, which the fast kernel takes.

    A weight moves by less than 1/8 of its own step. The new codes overwrite the frontend's, which
    has all weights in one buffer: those of no use would stay in memory.
    """
    nodes = model.get_ordered_ops()
    addresses = Counter(_address(node) for node in nodes if _is_eight_bits(node))
    for node in nodes:
        if node.get_friendly_name().startswith(WEIGHT) and node.get_type_name() == "Reshape":
            multiply = node.input_value(0).get_node()
            convert = multiply.input_value(0).get_node()
            if multiply.get_type_name() != "Multiply" or convert.get_type_name() != "Convert":
                continue
            codes, scale = convert.input_value(0).get_node(), _constant(multiply.input_value(1))
            shape = [*map(int, codes.get_output_shape(0))]
            if scale is not None and len(shape) == 3 and shape[2] == 16 and shape[1] % 2 == 0:
                if _is_eight_bits(codes) and addresses[_address(codes)] > 1:
                    codes = _copy_of(codes)
                node.output(0).replace(_as_groups_of_32(codes, scale).output(0))


def _is_eight_bits(node: Any) -> bool:
    import openvino as ov

    return bool(node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.i8)


def _address(constant: Any) -> int:
    return int(constant.get_data().ctypes.data)


def _copy_of(constant: Any) -> Any:
    from openvino import opset13

    return opset13.constant(constant.get_data())


def _as_groups_of_32(codes: Any, scale: Floats) -> Any:
    """A matrix [out, groups of 16, 16] of 6-bit codes, with scales [out, groups, 1].

    Overwrites the constant `codes`.
    """
    from openvino import opset13

    out, groups, size = map(int, codes.get_output_shape(0))
    step = np.empty((out, groups // 2, 1), np.float16)
    values = np.asarray(_Writable(codes))
    count = max(_WEIGHTS_AT_ONCE // (groups * size), 1)

    def regroup(at: int) -> None:
        rows = slice(at, at + count)
        step[rows] = _regroup(values[rows], scale[rows])

    with ThreadPoolExecutor() as pool:
        list(pool.map(regroup, range(0, out, count)))
    whole = _reshaped(codes, [out, groups // 2, 2 * size])
    steps = opset13.multiply(opset13.convert(whole, np.float16), opset13.constant(step))
    return opset13.convert(
        opset13.reshape(steps, np.array([out, groups * size]), False), np.float32
    )


def _regroup(codes: npt.NDArray[np.int8], scale: Floats) -> npt.NDArray[np.float16]:
    """Overwrite codes [rows, groups, 16] with those for steps [rows, groups / 2, 1], returned."""
    rows, groups = codes.shape[:2]
    ends = np.abs(codes).reshape(-1)  # a 6-bit code is at least -32
    while ends.size > rows * groups:
        # The larger of two neighbours: much faster in numpy than along short rows.
        ends = np.maximum(ends[0::2], ends[1::2])
    largest = ends.reshape(rows, groups) * np.abs(scale[..., 0])
    largest = largest.reshape(rows, groups // 2, 2).max(axis=2, keepdims=True)
    step: npt.NDArray[np.float16]
    step = np.maximum(largest / 127, np.finfo(np.float16).tiny).astype(np.float16)
    ratio = scale.reshape(rows, groups // 2, 2) / step.astype(np.float32)
    moved = codes.astype(np.float32)
    np.multiply(moved, ratio.reshape(rows, groups, 1), out=moved)
    np.rint(moved, out=moved)
    codes[:] = np.clip(moved, -127, 127, out=moved)
    return step


class _Writable:
    """The values of a constant as an array that may be written; numpy keeps the constant alive."""

    def __init__(self, constant: Any) -> None:
        self._constant = constant
        about = constant.get_data().__array_interface__
        self.__array_interface__ = {**about, "data": (about["data"][0], False)}


def _reshaped(constant: Any, shape: Sequence[int]) -> Any:
    """A constant with the same memory and another shape, which Python's Constant cannot make."""
    import openvino as ov
    from openvino import opset13
    from openvino.passes import ConstantFolding

    model = ov.Model([opset13.reshape(constant, np.array(shape), False)], [])
    ConstantFolding().run_on_model(model)
    return model.get_results()[0].input_value(0).get_node()


def _groups(output: Any, tensors: Mapping[str, Tensor]) -> _Groups | None:
    """The matrix behind a product's second input, if its zero points are fractional."""
    node = output.get_node()
    name = node.get_friendly_name().removeprefix(WEIGHT)
    # Gates of Qwen3.5's attention are in the matrix of its queries.
    tensor = tensors.get(name) or tensors.get(name.replace("attn_gate", "attn_q"))
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
    zero, scale = (_constant(operation.input_value(1)) for operation in (subtract, multiply))
    if codes.get_type_name() != "Constant" or zero is None or scale is None:
        return None
    if (zero == np.rint(zero)).all():
        return None
    # A group of equal weights has the scale 0, and no zero point.
    rounded = scale * zero
    exact = _offsets(tensor, scale, rounded) if tensor is not None else None
    return _Groups(codes, scale, rounded if exact is None else exact.reshape(scale.shape))


_BLOCK_BYTES = {"Q4_1": 20, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176}
"""Types with offsets; their blocks begin with two numbers in f16."""

_STEP, _OFFSET = 0, 1
"""Which of the two."""


def _offsets(tensor: Tensor, scale: Floats, rounded: Floats) -> Floats | None:
    """Offsets of groups of 32 weights, in order.

    None for a type without offsets, and where no rows match: the frontend divides the matrix of
    queries and gates of Qwen3.5, head by head, so a part's rows are those with its scales.

    Args:
        tensor: the matrix in the file.
        scale: of the product's matrix, [rows, groups, 1].
        rounded: the product's offsets, [rows, groups, 1]: of rows with equal scales the nearest is
            taken.
    """
    offsets = _numbers(tensor, _OFFSET)
    if offsets is None or offsets.size == scale.size:
        return offsets
    steps = _numbers(tensor, _STEP)
    assert steps is not None, "a type has both or neither"
    groups = scale.shape[1]
    offsets = offsets.reshape(-1, groups)
    places = defaultdict[bytes, list[int]](list)
    for at, row in enumerate(_halves(steps, groups)):
        places[row.tobytes()].append(at)
    rows = []
    for row, about in zip(_halves(scale, groups), rounded.reshape(-1, groups), strict=True):
        alike = places[row.tobytes()]
        if not alike:
            return None
        distances = np.abs(offsets[alike] - about).sum(axis=1)
        rows.append(alike[int(distances.argmin())])
    return offsets[rows]


def _halves(scales: Floats, groups: int) -> npt.NDArray[np.float16]:
    """Scales in the precision that the frontend keeps, [rows, groups]."""
    return scales.reshape(-1, groups).astype(np.float16)


def _numbers(tensor: Tensor, which: int) -> Floats | None:
    """`_STEP` or `_OFFSET` of a tensor's groups, in order; None for a type without offsets."""
    from gguf import GGMLQuantizationType
    from gguf.quants import Q4_K

    kind = GGMLQuantizationType(tensor.kind).name
    if kind not in _BLOCK_BYTES:
        return None
    blocks = tensor.data.reshape(-1, _BLOCK_BYTES[kind])
    unit: Floats = blocks[:, 2 * which : 2 * which + 2].copy().view(np.float16).astype(np.float32)
    if kind in ("Q4_1", "Q5_1"):  # they have the least weight, an offset of the other sign
        return -unit if which == _OFFSET else unit
    numbers: Floats = unit * Q4_K.get_scale_min(blocks[:, 4:16])[which]
    return numbers


def _constant(output: Any) -> Floats | None:
    node = output.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        return None
    values: Floats = node.get_data().astype(np.float32)
    return values


def _rewrite(product: Any, matrix: _Groups, sums: dict[tuple[str, int, int], Any]) -> None:
    from openvino import opset13

    codes, scale, offset = matrix
    out, groups, size = map(int, codes.get_output_shape(0))
    kind = codes.get_element_type()
    low, high = (-128, 127) if kind.get_type_name() == "i8" else (0, 2**kind.bitwidth - 1)
    # What rounding moves, beyond the range of the codes too, is in the second product.
    whole = np.rint(offset / np.where(scale == 0, np.inf, scale)).clip(low, high)
    zeros = opset13.convert(_typed(whole, kind), np.float16)
    steps = opset13.subtract(opset13.convert(codes, np.float16), zeros)
    values = opset13.multiply(steps, opset13.constant(scale.astype(np.float16)))
    shape = np.array([out, groups * size])
    weights = opset13.convert(opset13.reshape(values, shape, False), np.float32)
    rows = product.input_value(0)
    key = (rows.get_node().get_name(), rows.get_index(), size)
    if key not in sums:
        split = opset13.reshape(rows, np.array([0, 0, -1, groups, size]), True)
        sums[key] = opset13.reduce_mean(split, np.array([4]), False)
    moved = _in_eight_bits((size * (scale * whole - offset)).reshape(out, groups))
    first = opset13.matmul(rows, weights, False, True)
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
