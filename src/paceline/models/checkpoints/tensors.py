"""Tensors: those of a checkpoint's files, and those of the GGUF file that are made of them.

Independent of families. Values are read in pieces, some rows of a tensor each, so memory does not
grow with it, and without copying what is not asked for.

Invariant: every file is checked whole (header, sizes, dtypes) before the first tensor is read.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.files import read_json

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Index = slice | int | npt.NDArray[np.int64] | tuple[slice | int, ...]

_INDEX = "model.safetensors.index.json"
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "|u1"}
"""dtype of a file -> numpy dtype of its bytes. numpy has no bfloat16: it is the upper half of a
float32."""

Shape = tuple[int, ...]
Order = npt.NDArray[np.int64]

_PIECE_VALUES = 4 << 20
"""Values that are worked on at once: 16 MB as float32."""


class Stored(NamedTuple):
    """A tensor of a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, in the file."""


class Shards:
    """The tensors of a checkpoint, by name."""

    def __init__(self, folder: Path, rename: Callable[[str], str]) -> None:
        """Read the headers. Raises ModelError for missing, truncated or foreign files.

        Args:
            folder: a complete checkpoint; see `check_complete`.
            rename: gives the name under which a tensor is known here.
        """
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        for path in _paths(folder):
            for stored_name, tensor in _header(path):
                name = rename(stored_name)
                if name in self.tensors:
                    first = self.tensors[name].path.name
                    raise ModelError(f"tensor {name} is in both {first} and {path}")
                self.tensors[name] = tensor

    def floats(self, name: str, index: Index = slice(None)) -> Floats:
        """`tensor[index]` as float32."""
        values = self._mapped(name)[index]
        if self.tensors[name].dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def blocks(self, name: str, index: Index = slice(None)) -> Bytes:
        """`tensor[index]` of a tensor of bytes."""
        values: Bytes = self._mapped(name)[index]
        return values

    def _mapped(self, name: str) -> npt.NDArray[Any]:
        tensor = self.tensors[name]
        return np.memmap(tensor.path, _STORED[tensor.dtype], "r", tensor.offset, tensor.shape)


def _paths(folder: Path) -> Iterable[Path]:
    if (folder / _INDEX).is_file():
        return [
            folder / name for name in sorted(set(read_json(folder / _INDEX)["weight_map"].values()))
        ]
    return sorted(folder.glob("model*.safetensors"))


def _header(path: Path) -> Iterable[tuple[str, Stored]]:
    """Name and place of each tensor in a file, which safetensors has found to be whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except SafetensorError as error:
        reason = re.sub(r"^Error while deserializing header: ", "", str(error))
        raise ModelError(
            f"{path} is not a complete safetensors file (truncated?): {reason}; fetch it again"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    header.pop("__metadata__", None)
    for name, about in header.items():
        if about["dtype"] not in _STORED:
            raise ModelError(
                f"{path}: tensor {name} is {about['dtype']}; expected {', '.join(_STORED)}, the "
                "weights before they were quantized"
            )
        shape = tuple(about["shape"])
        if not math.prod(shape):
            raise ModelError(f"{path}: tensor {name} has no values (shape {shape})")
        yield name, Stored(path, about["dtype"], shape, 8 + length + about["data_offsets"][0])


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
    """A tensor whose values `change` rearranges; it keeps the number of rows.

    `shapes` are those in the checkpoint and in the file. A matrix [out, in] stays a matrix.
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
    pairs: Bytes = values[..., :16] | (values[..., 16:] << 4)
    return pairs


def pair_order(heads: int, head_dim: int) -> Order:
    """Order of q's or k's rows that brings together the two values that are rotated together.

    Transformers rotates value i of a head with value i + head_dim / 2.
    """
    rows = np.arange(heads * head_dim, dtype=np.int64)
    return rows.reshape(heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
