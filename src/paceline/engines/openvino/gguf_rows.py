"""Keeps a row's bits independent of the number of rows in a call.

OpenVINO's kernel for compressed weights adds the products of a row in parts, and where the
parts end depends on the number of rows and of inputs. Measured with 2026.4.1 on a CPU with AVX2 and
without VNNI, groups of 32: up to 80 rows and 4,096 inputs all give the same bits; more than 80 rows
give others from 576 inputs on, and at 4,864 to 6,144 inputs 2 to 4 rows give others than 5; where
the number of outputs is not a multiple of 32, up to 16 rows give others than 17. So calls have at
most `MOST_ROWS`, a product of more inputs becomes a sum of several, and outputs are filled up.
Models with a scale per output need the first on such a CPU (`rows_are_invariant`), none with VNNI.
"""

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from paceline.storage.openvino import core

MOST_ROWS = 64
"""Most rows of a call."""

_MOST_INPUTS = 4096
_OUTPUTS = 32
"""The number of outputs is a multiple of this."""


class _Chain(NamedTuple):
    """Weights [out, inputs], stored in groups: scale * (codes - zero)."""

    codes: Any
    """Constant node [out, groups, size]."""
    zero: Any
    """Output of a zero point, [out, groups, 1] or a scalar; None without."""
    scale: Any
    """Output of a scale, [out, groups, 1]."""


@cache
def rows_are_invariant() -> bool:
    """Whether, on this CPU, a row's bits are the same in calls of up to and above `MOST_ROWS`.

    Runs one product with 8-bit weights and a scale per output, as exported models have them.
    """
    import openvino as ov
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


def make_rows_invariant(model: Any) -> None:
    """Change products with weights in groups so that a row's bits are the same in every call."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and (chain := _chain(node.input_value(1))):
            out, groups, size = map(int, chain.codes.get_output_shape(0))
            product = _fill(node, chain, -out % _OUTPUTS) if out % _OUTPUTS else node
            if groups * size > _MOST_INPUTS and (chain := _chain(product.input_value(1))):
                _split(product, chain)


def _fill(product: Any, chain: _Chain, more: int) -> Any:
    """The product with `more` outputs, which are dropped again."""
    from openvino import opset13

    out, groups, size = map(int, chain.codes.get_output_shape(0))
    zero = None if chain.zero is None else _filled(_behind(chain.zero, "Convert"), more)
    scale = _filled(_behind(chain.scale, "Convert"), more)
    weights = _weights(_filled(chain.codes, more), zero, scale, [out + more, groups * size])
    filled = opset13.matmul(product.input_value(0), weights, False, True)
    last = np.array([-1])
    kept = opset13.slice(filled, np.array([0]), np.array([out]), np.array([1]), last)
    product.output(0).replace(kept.output(0))
    return filled


def _filled(constant: Any, more: int) -> Any:
    """A constant [out, ...] with `more` outputs of zeros; one value for all stays."""
    import openvino as ov
    from openvino import opset13

    kind = constant.get_element_type()
    shape = [*map(int, constant.get_output_shape(0))]
    if len(shape) < 3:
        return constant
    shape[0] += more
    if kind.bitwidth >= 8:
        data = constant.get_data()
        zeros = np.zeros((more, *shape[1:]), data.dtype)
        return opset13.constant(np.concatenate([data, zeros]), dtype=kind)
    data = constant.data.view(np.uint8).reshape(-1)
    count = int(np.prod(shape))
    nibbles = np.zeros(count + count % 2, np.uint8)
    known = count - more * int(np.prod(shape[1:]))
    nibbles[:known] = np.stack([data & 15, data >> 4], axis=1).reshape(-1)[:known]
    tensor = ov.Tensor(kind, ov.Shape(shape))
    tensor.data.view(np.uint8).reshape(-1)[:] = nibbles[0::2] | nibbles[1::2] << 4
    return opset13.constant(tensor)


def _chain(output: Any) -> _Chain | None:
    node = _behind(output, "Convert")
    if node.get_type_name() != "Reshape":
        return None
    multiply = node.input_value(0).get_node()
    if multiply.get_type_name() != "Multiply":
        return None
    codes, zero = multiply.input_value(0).get_node(), None
    if codes.get_type_name() == "Subtract":
        zero = codes.input_value(1)
        codes = codes.input_value(0).get_node()
    codes = _behind(codes.output(0), "Convert")
    if codes.get_type_name() != "Constant" or len(codes.get_output_shape(0)) != 3:
        return None
    return _Chain(codes, zero, multiply.input_value(1))


def _behind(output: Any, kind: str) -> Any:
    node = output.get_node()
    return node.input_value(0).get_node() if node.get_type_name() == kind else node


def _split(product: Any, chain: _Chain) -> None:
    from openvino import opset13

    out, groups, size = map(int, chain.codes.get_output_shape(0))
    count = -(-groups * size // _MOST_INPUTS)
    ends = [groups * part // count for part in range(count + 1)]
    lengths = np.diff(ends) * size
    parts = opset13.variadic_split(product.input_value(0), np.int64(-1), lengths)
    sums: list[Any] = []
    for number, (begin, end) in enumerate(pairwise(ends)):
        zero = None if chain.zero is None else _sliced_groups(chain.zero, begin, end)
        scale = _sliced_groups(chain.scale, begin, end)
        shape = [out, (end - begin) * size]
        weights = _weights(_sliced(chain.codes, begin, end), zero, scale, shape)
        part = opset13.matmul(parts.output(number), weights, False, True)
        sums.append(opset13.add(sums[-1], part) if sums else part)
    product.output(0).replace(sums[-1].output(0))


def _weights(codes: Any, zero: Any, scale: Any, shape: list[int]) -> Any:
    """Weights of `shape`, float32, in the form that `_chain` finds."""
    from openvino import opset13

    values = opset13.convert(codes, np.float16)
    if zero is not None:
        values = opset13.subtract(values, opset13.convert(zero, np.float16))
    values = opset13.multiply(values, scale)
    return opset13.convert(opset13.reshape(values, np.array(shape), False), np.float32)


def _sliced_groups(output: Any, begin: int, end: int) -> Any:
    """A constant of one value per group, or of one for all, without its conversion."""
    constant = _behind(output, "Convert")
    shape = [*map(int, constant.get_output_shape(0))]
    return _sliced(constant, begin, end) if len(shape) == 3 and shape[1] > 1 else constant


def _sliced(constant: Any, begin: int, end: int) -> Any:
    """Groups [begin, end) of a constant [out, groups, size]."""
    import openvino as ov
    from openvino import opset13

    kind = constant.get_element_type()
    out, groups, size = map(int, constant.get_output_shape(0))
    if kind.bitwidth >= 8:
        return opset13.constant(constant.get_data()[:, begin:end].copy(), dtype=kind)
    data = constant.data.view(np.uint8).reshape(-1)
    tensor = ov.Tensor(kind, ov.Shape([out, end - begin, size]))
    if size % 2:  # one value per group
        nibbles = np.stack([data & 15, data >> 4], axis=1).reshape(-1)[: out * groups * size]
        kept = nibbles.reshape(out, groups, size)[:, begin:end].reshape(-1)
        kept = np.append(kept, np.zeros(kept.size % 2, np.uint8))
        tensor.data.view(np.uint8).reshape(-1)[:] = kept[0::2] | kept[1::2] << 4
    else:
        kept = data.reshape(out, groups, size // 2)[:, begin:end]
        tensor.data.view(np.uint8).reshape(kept.shape)[:] = kept
    return opset13.constant(tensor)
