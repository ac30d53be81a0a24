"""Reads tensors of safetensors files, in pieces and without copying what is not asked for.

Invariant: every file is checked whole (header, sizes, dtypes) before the first tensor is read.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
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
        found: Bytes = self._mapped(name)[index]
        return found

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
