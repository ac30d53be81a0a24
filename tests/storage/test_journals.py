import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.storage import journals
from paceline.storage.journals import appending
from support.errors import raises

ENTRIES: list[dict[str, Any]] = [
    {"number": 1, "text": "naïve 漢字 😀"},
    {"text": "two\nlines\r\nand \u2028 another, \x85 too"},
    {},
    {"deep": {"list": [1, 2.5, None, True]}},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def read_journal(path: Path) -> list[dict[str, Any]]:
    return [entry for _, entry in journals.read_journal(path)]


def write(path: Path, *entries: dict[str, Any]) -> None:
    with appending(path) as append:
        for entry in entries:
            append(entry)


def test_entries_are_read_in_order_and_new_ones_are_appended(path: Path):
    assert read_journal(path) == []
    write(path)
    assert read_journal(path) == []
    write(path, *ENTRIES[:2])
    before = path.read_bytes()
    write(path, *ENTRIES[2:])
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().count(b"\n") == len(ENTRIES), "one line each"
    assert read_journal(path) == ENTRIES


def test_an_entry_is_on_disk_when_the_call_returns(path: Path):
    with appending(path) as append:
        for count, entry in enumerate(ENTRIES, start=1):
            append(entry)
            assert read_journal(path) == ENTRIES[:count]


def test_two_runs_cannot_append_at_the_same_time(path: Path):
    with appending(path) as append:
        append(ENTRIES[0])
        with raises(InvalidRequest, path.name):
            write(path, ENTRIES[1])
        append(ENTRIES[2])
    assert read_journal(path) == [ENTRIES[0], ENTRIES[2]]
    write(path, ENTRIES[1])
    assert len(read_journal(path)) == 3


def test_a_torn_last_line_is_ignored_and_overwritten(path: Path):
    line = json.dumps(ENTRIES[3]).encode()
    for whole in (ENTRIES[:2], []):
        for length in range(1, len(line) + 1):  # the last one lacks no more than its end
            path.unlink(missing_ok=True)
            write(path, *whole)
            path.write_bytes(path.read_bytes() + line[:length])
            assert read_journal(path) == whole
            write(path, ENTRIES[2])
            assert read_journal(path) == [*whole, ENTRIES[2]]


@pytest.mark.parametrize("line", [b"not json", b'{"a": "\xff"}', b"[]", b"null", b"[" * 100_000])
def test_an_invalid_line_is_reported_with_its_number(line: bytes, path: Path):
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    with raises(InvalidRequest, f"line 2 of {path}"):
        read_journal(path)


def test_a_path_that_cannot_be_read_or_written_is_reported(tmp_path: Path):
    (tmp_path / "file").write_text("{}\n")
    for path in (tmp_path, tmp_path / "file" / "journal.jsonl"):
        with raises(InvalidRequest, path):
            read_journal(path)
        with raises(InvalidRequest, path):
            write(path, {})


def test_a_full_disk_is_reported_and_entries_stay(path: Path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(InvalidRequest, match=str(path)), appending(path) as append:
            append({"number": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
            append({"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with appending(path) as append:
        append({"number": 3})
    assert read_journal(path) == [{"number": 1}, {"number": 3}]
