"""The storage of numbers in a Core ML package: MIL's types, and the weight file.

Does not depend on programs. A weight file has a header of 64 bytes and, per array, a record of 64
bytes with its type, size and offset (MILBlob's storage format, version 2, little-endian).
Invariant: reading a package fails if a record differs from the program's declaration.
"""

import math
import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError

Array = npt.NDArray[Any]

_HEADER = struct.Struct("<II56x")  # records, version
_RECORD = struct.Struct("<IIQQQ32x")  # mark, kind, bytes, offset of the numbers, padding bits
_MARK: Final = 0xDEADBEEF
_VERSION: Final = 2


class StoredType(NamedTuple):
    """The storage of a MIL type, and its numpy type."""

    held: type[np.generic]
    bits: int
    """Bits per stored number; numbers below 8 bits are packed, the first in the lowest bits."""
    kind: int | None = None
    """The type's number in a weight file; None: never in a file."""


DTYPES: Final = {
    "bool": StoredType(np.bool_, 8),
    "string": StoredType(np.str_, 8),
    "fp16": StoredType(np.float16, 16, 1),
    "fp32": StoredType(np.float32, 32, 2),
    "fp64": StoredType(np.float64, 64),
    "uint8": StoredType(np.uint8, 8, 3),
    "int8": StoredType(np.int8, 8, 4),
    "int16": StoredType(np.int16, 16, 6),
    "uint16": StoredType(np.uint16, 16, 7),
    "int4": StoredType(np.int8, 4, 8),
    "uint1": StoredType(np.uint8, 1, 9),
    "uint2": StoredType(np.uint8, 2, 10),
    "uint4": StoredType(np.uint8, 4, 11),
    "uint3": StoredType(np.uint8, 3, 12),
    "uint6": StoredType(np.uint8, 6, 13),
    "int32": StoredType(np.int32, 32, 14),
    "uint32": StoredType(np.uint32, 32, 15),
    "int64": StoredType(np.int64, 64),
    "uint64": StoredType(np.uint64, 64),
}
"""The supported MIL types, by their names in MIL's text format."""


@dataclass(frozen=True)
class WeightFile:
    """A weight file, mapped into memory when its first record is read."""

    path: Path

    @cached_property
    def data(self) -> npt.NDArray[np.uint8]:
        try:
            data: npt.NDArray[np.uint8] = np.asarray(np.memmap(self.path, np.uint8, "r"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path} cannot be read: {error}") from error
        if data.size < _HEADER.size:
            raise ModelError(f"{self.path} has {data.size} bytes; expected a weight file")
        _, version = _HEADER.unpack(data[: _HEADER.size].tobytes())
        if version != _VERSION:
            raise ModelError(
                f"{self.path} is a weight file of version {version}; expected version {_VERSION}"
            )
        return data

    def record(self, offset: int, dtype: str, count: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of `count` numbers of a type, given the offset of their record.

        Raises ModelError if the record is missing, or has another type or size.
        """
        data, where = self.data, f"{self.path}: the record at {offset}"
        if offset % _RECORD.size or not 0 < offset <= data.size - _RECORD.size:
            raise ModelError(f"{where} is outside the file, which has {data.size} bytes")
        mark, kind, size, begin, _ = _RECORD.unpack(data[offset : offset + _RECORD.size].tobytes())
        if mark != _MARK:
            raise ModelError(f"{where} is not a record; the file is corrupt")
        expected = bytes_of(dtype, count)
        if kind != DTYPES[dtype].kind or size != expected:
            raise ModelError(
                f"{where} has {size} bytes of type {kind}; expected {expected} bytes of type "
                f"{DTYPES[dtype].kind} ({dtype})"
            )
        if begin + size > data.size:
            raise ModelError(
                f"{where} ends at byte {begin + size}, but the file is truncated at {data.size}"
            )
        return data[begin : begin + size]


@dataclass(frozen=True, slots=True)
class Constant:
    """An array or string of a program; its numbers are read on access."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8] | str = field(repr=False)
    """Stored bytes (mapped from the weight file if large), or the string."""

    def value(self) -> Array | str:
        """Return the string, or the numbers in the numpy type of `DTYPES`, read-only."""
        if isinstance(self.data, str):
            return self.data
        return unpacked(self.data, self.dtype, math.prod(self.shape)).reshape(self.shape)


def bytes_of(dtype: str, count: int) -> int:
    return -(-count * DTYPES[dtype].bits // 8)


def unpacked(data: npt.NDArray[np.uint8], dtype: str, count: int) -> Array:
    """Unpack `count` numbers of a type from their bytes, in the numpy type of `DTYPES`."""
    held, bits, _ = DTYPES[dtype]
    if bits >= 8:
        return data.view(held)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        parts = (data[:, None] >> shifts) & np.uint8((1 << bits) - 1)
        numbers = parts.reshape(-1)[:count]
    else:  # numbers that cross bytes
        bit_rows = np.unpackbits(data, bitorder="little")[: count * bits].reshape(count, bits)
        numbers = np.packbits(bit_rows, axis=1, bitorder="little")[:, 0]
    if dtype == "int4":
        return (numbers.astype(np.int8) ^ 8) - 8
    return numbers.astype(held, copy=False)
