"""Files of columns round-trip, or raise an error that names the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ModelError
from paceline.storage.columns import read_columns, write_columns
from support.errors import raises

KIND = "a kind"


@dataclass(frozen=True, slots=True)
class Facts:
    name: str


@pytest.fixture
def path(tmp_path: Path) -> Path:
    columns: dict[str, Any] = {
        "a": np.arange(100, dtype=np.uint32),
        "none": np.empty(0, np.uint8),
        "b": np.arange(7, dtype=np.uint16),
    }
    write_columns(tmp_path / "x.bin", KIND, {"name": "n"}, columns)
    return tmp_path / "x.bin"


def test_columns_are_read_back(path: Path):
    facts, columns = read_columns(path, KIND, Facts)
    assert facts == Facts("n")
    assert {name: (value.dtype, value.tolist()) for name, value in columns.items()} == {
        "a": (np.uint32, list(range(100))),
        "none": (np.uint8, []),
        "b": (np.uint16, list(range(7))),
    }
    assert [result.name for result in path.parent.iterdir()] == ["x.bin"]


def test_mapped_columns_stay_valid_when_the_file_is_replaced(path: Path):
    _, columns = read_columns(path, KIND, Facts)
    write_columns(path, KIND, {"name": "m"}, {"a": np.zeros(100, np.uint32)})
    assert columns["a"].tolist() == list(range(100))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (b"a kind", b"a king", "a king"),
        (b'"version": 1', b'"version": 2', "version 2"),
        (b'"name": "n"', b'"name":  1 ', "name"),
        (b"uint32", b"float3", "float3"),
        (b"100", b"999", "bytes"),
        (b"100", b" -1", "columns"),
        (b"{", b"[", "JSON"),
    ],
)
def test_a_corrupt_header_is_a_single_error(path: Path, old: bytes, new: bytes, fault: str):
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with raises(ModelError, fault):
        read_columns(path, KIND, Facts)


@pytest.mark.parametrize("size", [None, 0, 60, 300])
def test_a_truncated_or_missing_file_is_a_single_error(path: Path, size: int | None):
    content = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(content[:size])
    with raises(ModelError, "x.bin"):
        read_columns(path, KIND, Facts)
