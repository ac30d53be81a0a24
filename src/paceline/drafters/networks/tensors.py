"""Reads safetensors files as float32, for checkpoints of every drafter with a network.

A file is untrusted: its header is compared with its size before anything is read, and any fault is
a ModelError. Only the tensors that are asked for are read, so a head may be inside a large model.
"""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError

Array = npt.NDArray[np.float32]

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "I8": 1, "BOOL": 1}
_FLOATS = {"F32": np.float32, "F16": np.float16}
_INTEGERS = {"I64": np.int64, "I32": np.int32}
_LONGEST_HEADER = 100 * 2**20
"""Bytes; the limit of the safetensors library."""


class StoredTensor:
    """A tensor of a file, not read yet."""

    def __init__(self, path: Path, name: str, dtype: str, shape: tuple[int, ...], at: int) -> None:
        self._path, self._name, self._at = path, name, at
        self.dtype = dtype
        """As safetensors names it: `BF16`, `F32`, `I64`."""
        self.shape = shape

    def floats(self) -> Array:
        """Its values. Raises ModelError if it is not BF16, F16 or F32."""
        if self.dtype == "BF16":  # the upper half of a float32
            bits = self._read(np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        if self.dtype not in _FLOATS:
            raise ModelError(
                f"{self._path}: {self._name} is {self.dtype}, expected BF16, F16 or F32"
            )
        return self._read(_FLOATS[self.dtype]).astype(np.float32).reshape(self.shape)

    def rows(self) -> Callable[[Any], Array]:
        """Reads rows of a matrix as float32 by their indices; the file is mapped, not read."""
        kinds = {"BF16": np.uint16, **_FLOATS}
        if self.dtype not in kinds:
            self.floats()  # raises
        mapped: Any = np.memmap(
            self._path, kinds[self.dtype], mode="r", offset=self._at, shape=self.shape
        )
        if self.dtype != "BF16":
            return lambda indices: np.asarray(mapped[indices], np.float32)
        return lambda indices: (mapped[indices].astype(np.uint32) << 16).view(np.float32)

    def integers(self) -> npt.NDArray[np.int64]:
        """Its values. Raises ModelError if it is not I64 or I32."""
        if self.dtype not in _INTEGERS:
            raise ModelError(f"{self._path}: {self._name} is {self.dtype}, expected I64 or I32")
        return self._read(_INTEGERS[self.dtype]).astype(np.int64).reshape(self.shape)

    def _read(self, kind: Any) -> npt.NDArray[Any]:
        return np.fromfile(self._path, kind, count=prod(self.shape), offset=self._at)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all safetensors files of a folder, by name.

    Raises ModelError if there is no such file, or one is not whole.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} has no .safetensors file; expected a checkpoint")
    return {name: tensor for path in paths for name, tensor in _tensors_of(path).items()}


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = _header_length(file.read(8), size)
            header = json.loads(file.read(length))
        return {
            name: _tensor(path, name, entry, 8 + length, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error


def _header_length(begin: bytes, size: int) -> int:
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"its header has {length} bytes, the file {size}")
    return length


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    if not 0 <= begin <= end <= size - data or min(shape, default=0) < 0:
        raise ValueError(f"{name} ends after the file does (truncated?)")
    if dtype in _BYTES and prod(shape) * _BYTES[dtype] != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, not those of {list(shape)} {dtype}")
    return StoredTensor(path, name, dtype, shape, data + begin)


def check_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, StoredTensor],
    *,
    finite: bool = True,
) -> None:
    """Check names and shapes of tensors, and if `finite` is set their values.

    Raises ModelError: the message names the first five faults and counts the others.
    """
    faults = []
    for name, shape in shapes.items():
        if name not in tensors:
            faults.append(f"{name} is missing")
        elif tensors[name].shape != shape:
            faults.append(f"{name} is {list(tensors[name].shape)}, expected {list(shape)}")
        elif finite and not np.isfinite(tensors[name].floats()).all():
            faults.append(f"{name} has values that are not finite")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ModelError(f"the weights in {path} cannot be used: {'; '.join(faults[:5])}{more}")
