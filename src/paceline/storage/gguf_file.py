"""Reads GGUF files (versions 2 and 3, little-endian) and their shards, and writes other weights.

Independent of the metadata's meaning. Invariant: a file is untrusted; every count is compared with
the remaining bytes before allocation, so memory is proportional to the file, and any fault is a
ModelError.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.files import check_no_pointer
from paceline.storage.shards import shards_beside

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_METADATA = 256 * 2**20
"""Bytes. The largest vocabularies in use take less than 20 MiB."""

_BEGINNING = 1 << 16
"""Bytes from the start that have all of a file's keys except its tokenizer's."""

_NUMBER, _COUNT, _TENSORS = _SPLIT = ("split.no", "split.count", "split.tensors.count")
"""Fields of a shard."""

_GIVE_FOLDER = "give the path of its model's folder"
_OTHER_FORMATS = (
    ("XML", (b"<?xml",), "download a GGUF file of the model"),
    (
        "a web page",
        (b"<",),
        "download the file itself (on the Hugging Face Hub /resolve/, not /blob/)",
    ),
    ("JSON", (b"{", b"["), _GIVE_FOLDER + ", or download the file again"),
    ("a ZIP archive", (b"pk\x03\x04",), "unpack it, or download a GGUF file"),
    ("a PyTorch checkpoint", (b"\x80\x02",), "download a GGUF file of the model"),
    ("compressed", (b"\x1f\x8b", b"bzh", b"\xfd7zxz", b"(\xb5/\xfd", b"7z\xbc"), "decompress it"),
    ("in GGML's old format", (b"lmgg", b"fmgg", b"tjgg", b"algg"), "download a newer file"),
)
"""Format, how its files begin in lower case, and what to do."""

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
"""GGUF type of a number -> numpy dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class NumberArray:
    """An array of numbers in the metadata; compares unequal to any number."""

    values: npt.NDArray[Any]
    """[count], a view of the file."""


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    """Outermost size first: [out, in] of a matrix."""
    kind: int
    """Number of its `GGMLQuantizationType`."""
    data: Bytes
    """[..., bytes of a row] uint8, a view of the file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Content of a model's files."""

    fields: Mapping[str, Any]
    """Metadata: numbers, strings, lists of strings, and arrays of numbers."""
    raw: Mapping[str, Bytes]
    """Field -> its bytes, including its name and type."""
    tensors: list[Tensor]

    @property
    def family(self) -> Any:
        return self.fields.get("general.architecture")

    def family_value(self, key: str, default: Any = None) -> Any:
        """Return a value that the file has under its family's name, such as `block_count`."""
        return self.fields.get(f"{self.family}.{key}", default)


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of a file; tensors are views of it, and of the other shards of a model.

    Raises ModelError if a file cannot be read, is not complete, or is not a part of this model.
    """
    shards = shards_beside(path)
    files = [_read(shard) for shard in shards]
    if len(shards) == 1 and files[0].fields.get(_COUNT, 1) in (0, 1):
        return files[0]
    for number, (shard, file) in enumerate(zip(shards, files, strict=True)):
        for field, expected in ((_NUMBER, number), (_COUNT, len(shards))):
            if (value := file.fields.get(field)) != expected:
                raise ModelError(
                    f"{shard} is not part {number + 1} of {len(shards)} of its model, as its name "
                    f"has it: its {field} is {short(value)}, expected {expected}; download it again"
                )
    tensors = [tensor for file in files for tensor in file.tensors]
    if (count := files[0].fields.get(_TENSORS, len(tensors))) != len(tensors):
        raise ModelError(
            f"{shards[0]} and its other parts have {len(tensors)} tensors, expected "
            f"{short(count)}: they belong to different models; download them again"
        )
    fields = {name: value for name, value in files[0].fields.items() if name not in _SPLIT}
    return GgufFile(fields, {name: files[0].raw[name] for name in fields}, tensors)


def _read(path: Path) -> GgufFile:
    _check_header(path)
    try:
        return _Reader(np.memmap(path, np.uint8, mode="r")).read()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except _FormatError as error:
        raise ModelError(
            f"{path} is not a complete GGUF file (truncated?): {error}; download it again"
        ) from error


def architecture_of(path: Path) -> str:
    """Read a file's architecture from its beginning; return "" if there is none."""
    key = b"general.architecture" + struct.pack("<I", _STRING)
    try:
        with path.open("rb") as file:
            head = file.read(_BEGINNING)
    except OSError:
        return ""
    at = head.find(key) + len(key)
    if not head.startswith(_MAGIC) or at < len(key) or len(head) < at + 8:
        return ""
    length = struct.unpack_from("<Q", head, at)[0]
    return head[at + 8 : at + 8 + length].decode(errors="replace")


class _FormatError(Exception):
    """A fault of a file."""


class _Reader:
    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._view = memoryview(data.data)
        self._at = 0
        self._end = len(data)

    def read(self) -> GgufFile:
        self._take(len(_MAGIC) + 4)
        tensor_count, field_count = self._number("<Q"), self._number("<Q")
        fields: dict[str, Any] = {}
        raw: dict[str, Bytes] = {}
        for _ in self._times(field_count, 8 + 4 + 1):
            begin = self._at
            name = self._text()
            if name in fields:
                raise _FormatError(f"the field {short(repr(name))} occurs twice")
            fields[name] = self._value(self._number("<I"), name)
            raw[name] = self._data[begin : self._at]
            if self._at > _MAX_METADATA:
                raise _FormatError(f"its metadata is larger than {_MAX_METADATA} bytes")
        infos = [self._tensor_info() for _ in self._times(tensor_count, 8 + 4 + 8 + 4 + 8)]
        return GgufFile(fields, raw, self._tensors(infos, _alignment(fields)))

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._numbers(kind, 1, name)[0].item()
        inner, count = self._number("<I"), self._number("<Q")
        if inner == _STRING:
            return [self._text() for _ in self._times(count, 8)]
        return NumberArray(self._numbers(inner, count, name))

    def _numbers(self, kind: int, count: int, name: str) -> npt.NDArray[Any]:
        """Return [count] numbers of the type `kind`, a view of the file."""
        if kind == _ARRAY:
            raise _FormatError(f"the field {short(repr(name))} has nested arrays")
        if kind not in _NUMBERS:
            raise _FormatError(f"the field {short(repr(name))} is of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        begin = self._take(count * dtype.itemsize)
        numbers = self._data[begin : self._at]
        return numbers != 0 if dtype == np.bool_ else numbers.view(dtype)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, sizes (innermost first), type, and offset of the data."""
        name, dimensions = self._text(), self._number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise _FormatError(f"tensor {short(repr(name))} has {dimensions} dimensions")
        sizes = tuple(self._number("<Q") for _ in range(dimensions))
        return name, sizes, self._number("<I"), self._number("<Q")

    def _tensors(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> list[Tensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        total = 0
        for name, sizes, kind, offset in infos:
            what = f"tensor {short(repr(name))}"
            if name in tensors:
                raise _FormatError(f"{what} occurs twice")
            try:
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise _FormatError(f"{what} is of the unknown type {kind}") from None
            if not all(sizes) or sizes[0] % block:
                raise _FormatError(f"{what} has the invalid shape {sizes}")
            shape = tuple(reversed(sizes))
            rows = (*shape[:-1], sizes[0] // block * block_bytes)
            count = math.prod(rows)
            total += count
            start = begin + offset
            if start + count > self._end or total > self._end:
                raise _FormatError(f"{what} is truncated")
            data = self._data[start : start + count].reshape(rows)
            tensors[name] = Tensor(name, shape, kind, data)
        return list(tensors.values())

    def _text(self) -> str:
        begin = self._take(self._number("<Q"))
        try:
            return str(self._view[begin : self._at], "utf-8")
        except UnicodeDecodeError:
            raise _FormatError(f"the string at byte {begin} is not UTF-8") from None

    def _number(self, form: str) -> int:
        begin = self._take(struct.calcsize(form))
        value: int = struct.unpack_from(form, self._view, begin)[0]
        return value

    def _times(self, count: int, min_bytes: int) -> range:
        """Return range(count) if the file has room for `count` items of at least `min_bytes`."""
        if count * min_bytes > self._end - self._at:
            raise _FormatError(f"it ends before {count} items at byte {self._at}")
        return range(count)

    def _take(self, count: int) -> int:
        """Advance by `count` bytes; returns their offset."""
        begin = self._at
        if count > self._end - begin:
            raise _FormatError(f"it ends before {count} bytes at byte {begin}")
        self._at += count
        return begin


def write_gguf(
    path: Path,
    source: GgufFile,
    forms: Mapping[str, tuple[int, int]],
    values: Callable[[Tensor], npt.NDArray[Any]],
    update: Callable[[int], Any],
) -> None:
    """Write a file with the metadata of `source` and other weights.

    Args:
        path: the file to write.
        source: its metadata and tensor names are kept.
        forms: tensor name -> its type, a `GGMLQuantizationType`, and its bytes.
        values: returns the weights of a tensor, with its bytes in `forms`.
        update: called with the bytes of weights written so far.
    """
    # Empty lists have lost their type, and the alignment is that of this writer.
    kept = [
        raw
        for name, raw in source.raw.items()
        if name != "general.alignment" and not _is_empty(source.fields[name])
    ]
    with path.open("wb") as file:
        file.write(_MAGIC + struct.pack("<IQQ", 3, len(source.tensors), len(kept)))
        for raw in kept:
            file.write(raw.data)
        offset = 0
        for tensor in source.tensors:
            kind, size = forms[tensor.name]
            name, sizes = tensor.name.encode(), tensor.shape[::-1]
            file.write(struct.pack("<Q", len(name)) + name)
            file.write(struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset))
            offset += _aligned(size)
        _pad(file)
        done = 0
        for tensor in source.tensors:
            written = values(tensor)
            file.write(np.ascontiguousarray(written).data)
            _pad(file)
            update(done := done + written.nbytes)


def _check_header(path: Path) -> None:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ModelError(f"{path} is not a file; expected a GGUF file")
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    check_no_pointer(path, head)
    if head[:4] != _MAGIC:
        raise ModelError(f"{path} is {_other_format(head)}")
    version = struct.unpack("<I", head[4:8])[0] if len(head) >= 8 else 0
    if version in (2 << 24, 3 << 24):
        raise ModelError(f"{path} is for big-endian computers; download the usual GGUF file")
    if version not in _VERSIONS:
        raise ModelError(f"{path} is GGUF version {version}; expected version 2 or 3")


def _other_format(head: bytes) -> str:
    """Return the format of a file that is not GGUF, and what to do, as the end of a sentence."""
    if head[7:10] == b'\0{"':  # after the header's length
        return f"a safetensors file, not a GGUF file; {_GIVE_FOLDER}, or download a GGUF file"
    for format_, beginnings, advice in _OTHER_FORMATS:
        if head.lower().lstrip().startswith(beginnings):
            return f"{format_}, not a GGUF file; {advice}"
    begins = f"it begins with {head[:16]!r}, not {_MAGIC!r}" if head.strip(b"\0") else "it is empty"
    return f"not a GGUF file ({begins}); download it again"


def _alignment(fields: Mapping[str, Any]) -> int:
    value = fields.get("general.alignment", _ALIGNMENT)
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise _FormatError(f"its alignment is {short(repr(value))}, expected a power of 2")
    return value


def _is_empty(value: object) -> bool:
    values = value.values if isinstance(value, NumberArray) else value
    return isinstance(values, list | np.ndarray) and len(values) == 0


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _pad(file: BinaryIO) -> None:
    at = file.tell()
    file.write(bytes(_aligned(at) - at))


def short(value: object) -> str:
    """Format an untrusted value for a message: one line, at most 64 characters."""
    return " ".join(str(value)[:64].split())
