"""What a tensor of a GGUF file is made of, and how its values are read piece by piece.

Independent of families. A piece is some rows of the tensor, so memory does not grow with it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.models.to_gguf.shards import Bytes, Floats, Shards

Shape = tuple[int, ...]
Order = npt.NDArray[np.int64]

_PIECE_VALUES = 4 << 20
"""Values that are worked on at once: 16 MB as float32."""


class Form(Enum):
    """How a tensor is stored."""

    MATRIX = auto()
    TABLE = auto()
    """Embeddings and the head: read row by row, and more sensitive than other matrices."""
    PLAIN = auto()
    """float32: norms, biases, routers."""
    MXFP4 = auto()
    """As in the checkpoint."""


class Output(NamedTuple):
    """A tensor of the GGUF file."""

    name: str
    shape: Shape
    form: Form
    sources: Mapping[str, Shape]
    """Tensors of the checkpoint that it is made of."""
    pieces: Callable[[Shards], Iterator[Floats] | Iterator[Bytes]]
    """Yields the rows in order, in pieces of bounded size."""


def whole(
    name: str,
    source: str,
    shape: Shape,
    form: Form,
    *,
    order: Order | None = None,
    shift: float = 0,
) -> Output:
    """One tensor as it is, its rows in another `order`, or with `shift` added."""

    def pieces(shards: Shards) -> Iterator[Floats]:
        step = max(1, _PIECE_VALUES // shape[-1]) if len(shape) > 1 else shape[0]
        for begin in range(0, shape[0], step):
            part = slice(begin, begin + step)
            values = shards.floats(source, part if order is None else order[part])
            yield values + np.float32(shift) if shift else values

    return Output(name, shape, form, {source: shape}, pieces)


def rearranged(
    name: str, source: str, shapes: tuple[Shape, Shape], change: Callable[[Floats], Floats]
) -> Output:
    """A tensor as `change` makes it of its values, of as many rows as it is given.

    `shapes` are those in the checkpoint and in the file. A matrix [out, in] there is one here.
    """
    stored, shape = shapes
    form = Form.MATRIX if len(stored) > 1 and stored == shape else Form.PLAIN

    def pieces(shards: Shards) -> Iterator[Floats]:
        step = max(1, _PIECE_VALUES // shape[-1]) if form is Form.MATRIX else shape[0]
        for begin in range(0, shape[0], step):
            yield change(shards.floats(source, slice(begin, begin + step)))

    return Output(name, shape, form, {source: stored}, pieces)


def stacked(name: str, sources: Sequence[str], shape: Shape, form: Form) -> Output:
    """Matrices [out, in], one per expert, as one tensor [experts, out, in]."""

    def pieces(shards: Shards) -> Iterator[Floats]:
        return (shards.floats(source) for source in sources)

    return Output(name, (len(sources), *shape), form, dict.fromkeys(sources, shape), pieces)


def cut(
    name: str,
    source: str,
    source_shape: Shape,
    shape: Shape,
    part: slice,
    *,
    transposed: bool = False,
    form: Form = Form.MATRIX,
) -> Output:
    """A part of the middle dimension of a tensor [experts, n, in], expert by expert.

    `transposed`: the tensor is [experts, in, n]. Of biases [experts, n] it is the last dimension.
    """

    def pieces(shards: Shards) -> Iterator[Floats]:
        for expert in range(shape[0]):
            values = shards.floats(source, expert)
            yield np.ascontiguousarray((values.T if transposed else values)[part])

    return Output(name, shape, form, {source: source_shape}, pieces)


def mxfp4(name: str, source: str, rows: int, shape: Shape, part: slice) -> Output:
    """Rows of MXFP4 experts: `source`_blocks [experts, rows, groups, 16], `source`_scales.

    Yields [experts, out, groups * 17] uint8: a scale, then 16 bytes with two values each.
    """
    experts, _, size = shape
    groups = size // 32
    blocks, scales = f"{source}_blocks", f"{source}_scales"

    def pieces(shards: Shards) -> Iterator[Bytes]:
        for expert in range(experts):
            values = _reorder(shards.blocks(blocks, expert)[part])
            scale = shards.blocks(scales, expert)[part]
            yield np.concatenate([scale[..., None], values], axis=-1).reshape(len(values), -1)

    sources = {blocks: (experts, rows, groups, 16), scales: (experts, rows, groups)}
    return Output(name, shape, Form.MXFP4, sources, pieces)


def _reorder(blocks: Bytes) -> Bytes:
    """[..., 16] bytes of 4-bit pairs 0 1, 2 3, ... -> pairs 0 16, 1 17, ..., as GGUF has them.

    The first of a pair is in the lower half of the byte, in both.
    """
    values = np.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    found: Bytes = values[..., :16] | (values[..., 16:] << 4)
    return found


def pair_order(heads: int, head_dim: int) -> Order:
    """Order of q's or k's rows that brings together the two values that are rotated together.

    Transformers rotates value i of a head with value i + head_dim / 2.
    """
    rows = np.arange(heads * head_dim, dtype=np.int64)
    return rows.reshape(heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
