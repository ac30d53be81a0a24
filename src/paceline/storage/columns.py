"""A file of columns: a line of JSON, then arrays, memory-mapped when read.

The line names the kind, the facts, and the type and length of every column. The file appears by one
rename. Contents are not hashed: the reader of a column checks that its values are in range.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.files import write_bytes
from paceline.storage.validation import Count, Limit, validated

_T = TypeVar("_T")

_ALIGNMENT = 64
"""Bytes: every array begins at a multiple of this."""

_LINE_BYTES = 1 << 16
"""Maximum length of the first line."""

_TYPES = {name: np.dtype(name) for name in ("uint8", "uint16", "uint32")}

_Columns = dict[str, tuple[Annotated[str, Limit(max_length=16)], Count]]


def write_columns(
    path: Path, kind: str, facts: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Write columns of uint8, uint16 or uint32, of one dimension. Raises OSError."""
    about = {
        "kind": kind,
        "version": 1,
        **facts,
        "columns": {name: (str(column.dtype), len(column)) for name, column in columns.items()},
    }
    parts = [json.dumps(about).encode()]
    parts[0] += b" " * (-(len(parts[0]) + 1) % _ALIGNMENT) + b"\n"
    for column in columns.values():
        content = column.tobytes()
        parts.append(content + b"\0" * (-len(content) % _ALIGNMENT))
    write_bytes(path, b"".join(parts))


def read_columns(path: Path, kind: str, facts: type[_T]) -> tuple[_T, dict[str, npt.NDArray[Any]]]:
    """Return the facts and the columns of a file, as memory maps.

    Args:
        path: the file.
        kind: the kind that it must be.
        facts: a dataclass of the facts that it must have.

    Raises:
        ModelError: it cannot be read, is of another kind or version, or does not have the size
            that its first line lists.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_LINE_BYTES)
            value = json.loads(line)
            size = file.seek(0, 2)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} does not begin with a line of JSON") from error
    stored = (value.get("kind"), value.get("version")) if isinstance(value, dict) else (None, None)
    if stored != (kind, 1):
        raise ModelError(
            f"{path} is a {stored[0]} of version {stored[1]}; expected a {kind} of version 1"
        )
    about = validated(facts, value, str(path), error=ModelError)
    listed = validated(_Columns, value.get("columns"), f"{path}: columns", error=ModelError)
    columns: dict[str, npt.NDArray[Any]] = {}
    at = len(line)
    for name, (type_, count) in listed.items():
        if type_ not in _TYPES:
            raise ModelError(f"{path}: {name} is of {type_}; expected {', '.join(_TYPES)}")
        bytes_ = count * _TYPES[type_].itemsize
        if at + bytes_ > size:
            raise ModelError(f"{path} has {size} bytes, which end in the column {name}")
        columns[name] = (
            np.memmap(path, _TYPES[type_], "r", at, (count,)) if count else np.empty(0, type_)
        )
        at += bytes_ + -bytes_ % _ALIGNMENT
    return about, columns
