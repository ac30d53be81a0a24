"""Makes graph nodes of a GGUF file's tensors, for graphs that are built here.

They have the forms that OpenVINO's GGUF frontend gives its own, so `gguf_weights` finds them. F32,
F16, BF16, Q8_0, Q4_0 and Q4_K stay as they are. Other types become 8 bits in groups of 32, which
the fast kernel takes: with up to 6 bits a weight then moves by less than 1/8 of its step.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.engines.openvino.gguf_weights import WEIGHT
from paceline.storage.gguf_file import Tensor

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_GROUP = 32
_ROWS_AT_ONCE = 4096
_VALUES_AT_ONCE = 1 << 19
"""About 2 MB as float32."""


def floats(tensor: Tensor) -> Floats:
    """The values of a small tensor, in its shape."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Floats = dequantize(tensor.data, GGMLQuantizationType(tensor.kind)).astype(np.float32)
    return values.reshape(tensor.shape)


def matrix(tensor: Tensor) -> Any:
    """Output [..., out, in] float32 of a matrix, or of the matrices of experts."""
    from gguf import GGMLQuantizationType
    from openvino import opset13

    kind = GGMLQuantizationType(tensor.kind).name
    # As an array of its own kind: a view of a mapped file is slow to cut up.
    rows = np.asarray(tensor.data).view(np.ndarray).reshape(-1, tensor.data.shape[-1])
    if kind in ("F32", "F16", "BF16"):
        node = _plain(rows, kind, tensor.shape)
    else:
        make = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k}.get(kind, _eight_bits)
        values = make(rows, tensor)
        node = opset13.reshape(values, np.array(tensor.shape), False)
        if node.get_element_type().get_type_name() != "f32":
            node = opset13.convert(node, np.float32)
    node.set_friendly_name(WEIGHT + tensor.name)
    return node.output(0)


def _plain(rows: Bytes, kind: str, shape: tuple[int, ...]) -> Any:
    import openvino as ov
    from openvino import opset13

    kinds = {"F32": ov.Type.f32, "F16": ov.Type.f16, "BF16": ov.Type.bf16}
    held = ov.Tensor(kinds[kind], ov.Shape(shape))
    held.data.reshape(-1).view(np.uint8)[:] = rows.reshape(-1)
    node = opset13.constant(held)
    return node if kind == "F32" else opset13.convert(node, np.float32)


def _q8_0(rows: Bytes, tensor: Tensor) -> Any:
    """Blocks of 34 bytes: a float16 scale, 32 codes."""
    blocks = rows.reshape(len(rows), -1, 34)
    codes = _constant(blocks[..., 2:].view(np.int8), tensor)
    return _scaled(codes, _half(blocks, 0), tensor)


def _q4_0(rows: Bytes, tensor: Tensor) -> Any:
    """Blocks of 18 bytes: a float16 scale, 16 bytes with codes i and i + 16, less 8."""
    blocks = rows.reshape(len(rows), -1, 18)
    # Less 8, in 4 bits, is the highest bit inverted.
    codes = _nibbles(blocks[..., 2:] ^ np.uint8(0x88), "i4", tensor)
    return _scaled(codes, _half(blocks, 0), tensor)


def _q4_k(rows: Bytes, tensor: Tensor) -> Any:
    """Blocks of 144 bytes: two float16 scales, 12 bytes of 6-bit scales and offsets, 256 codes.

    Group 2 i has the lower halves of the i-th 32 bytes of codes, group 2 i + 1 the upper ones.
    """
    from gguf.quants import Q4_K
    from openvino import opset13

    blocks = rows.reshape(-1, 144)
    scales, offsets = Q4_K.get_scale_min(blocks[:, 4:16])
    shape = (*tensor.shape[:-1], -1, 1)
    scale = (_half(blocks, 0) * scales).astype(np.float32).reshape(shape)
    offset = (_half(blocks, 2) * offsets).astype(np.float32).reshape(shape)
    codes = _nibbles(rows.reshape(len(rows), -1, 144)[..., 16:], "u4", tensor)
    zeros = offset / np.where(scale == 0, np.inf, scale)
    zero, step = (
        opset13.convert(opset13.constant(array.astype(np.float16)), np.float32)
        for array in (zeros, scale)
    )
    return opset13.multiply(opset13.subtract(opset13.convert(codes, np.float32), zero), step)


def _eight_bits(rows: Bytes, tensor: Tensor) -> Any:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType(tensor.kind)
    of_blocks = getattr(quants, kind.name).dequantize_blocks
    groups = tensor.shape[-1] // _GROUP
    codes = np.empty((len(rows), groups, _GROUP), np.int8)
    scale = np.empty((len(rows), groups, 1), np.float16)
    step = max(1, _VALUES_AT_ONCE // tensor.shape[-1])

    def fill(at: int) -> None:
        part = slice(at, at + step)
        blocks = np.ascontiguousarray(rows[part]).reshape(-1, GGML_QUANT_SIZES[kind][1])
        values = of_blocks(blocks).reshape(codes[part].shape)
        largest = np.maximum(values.max(axis=2, keepdims=True), -values.min(axis=2, keepdims=True))
        scale[part] = np.maximum(largest / 127, np.finfo(np.float16).tiny)
        values /= scale[part].astype(np.float32)
        codes[part] = np.rint(values, out=values).clip(-127, 127, out=values)

    with ThreadPoolExecutor() as pool:  # numpy leaves the interpreter free while it computes
        list(pool.map(fill, range(0, len(rows), step)))
    return _scaled(_constant(codes, tensor), scale, tensor)


def _half(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """[..., 1]: the float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _scaled(codes: Any, scale: npt.NDArray[np.float16], tensor: Tensor) -> Any:
    from openvino import opset13

    steps = opset13.constant(scale.reshape(*tensor.shape[:-1], -1, 1))
    return opset13.multiply(opset13.convert(codes, np.float16), steps)


def _constant(values: npt.NDArray[np.int8], tensor: Tensor) -> Any:
    """A constant of codes [..., out, groups, 32]: experts are a dimension of their own."""
    import openvino as ov
    from openvino import opset13

    held = ov.Tensor(ov.Type.i8, ov.Shape((*tensor.shape[:-1], *values.shape[1:])))
    held.data.reshape(values.shape)[...] = values
    return opset13.constant(held)


def _nibbles(blocks: Bytes, kind: str, tensor: Tensor) -> Any:
    """A constant [..., out, groups, 32] of 4-bit codes.

    `blocks` is [rows, blocks, bytes]; of a run of bytes, of 32 or of a whole block if that is
    less, the lower halves come first. OpenVINO's 4-bit types have the first code of two in the
    lower half of a byte.
    """
    import openvino as ov
    from openvino import opset13

    shape = (*tensor.shape[:-1], tensor.shape[-1] // _GROUP, _GROUP)
    held = ov.Tensor(getattr(ov.Type, kind), ov.Shape(shape))
    packed = held.data.reshape(-1).view(np.uint8).reshape(len(blocks), -1)
    for at in range(0, len(blocks), _ROWS_AT_ONCE):
        part = slice(at, at + _ROWS_AT_ONCE)
        part_blocks = np.ascontiguousarray(blocks[part])
        runs = part_blocks.reshape(len(part_blocks), -1, min(32, part_blocks.shape[2]))
        codes = np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(part_blocks), -1)
        packed[part] = codes[:, 0::2] | codes[:, 1::2] << 4
    return opset13.constant(held)
