import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.storage.json_lines import appending, read_journal
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


def write(path: Path, *entries: dict[str, Any]) -> None:
    with appending(path) as append:
        for entry in entries:
            append(entry)


def test_entries_come_back_in_order(path: Path):
    write(path, *ENTRIES)
    assert read_journal(path) == ENTRIES
    assert path.read_bytes().count(b"\n") == len(ENTRIES), "one line each"


def test_more_entries_come_after_those_that_are_there(path: Path):
    write(path, *ENTRIES[:2])
    before = path.read_bytes()
    write(path)
    assert path.read_bytes() == before
    write(path, *ENTRIES[2:])
    assert path.read_bytes().startswith(before)
    assert read_journal(path) == ENTRIES


def test_where_there_is_no_file_there_are_no_entries(path: Path):
    assert read_journal(path) == []
    write(path)
    assert read_journal(path) == []


def test_an_entry_is_there_when_the_call_returns(path: Path):
    with appending(path) as append:
        for count, entry in enumerate(ENTRIES, start=1):
            append(entry)
            assert read_journal(path) == ENTRIES[:count]


def test_what_was_written_stays_when_the_work_is_stopped(path: Path):
    def work() -> None:
        with appending(path) as append:
            append(ENTRIES[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert read_journal(path) == ENTRIES[:1]


def test_two_runs_do_not_append_at_once(path: Path):
    with appending(path) as append:
        append(ENTRIES[0])
        with raises(InvalidRequest, path.name):
            write(path, ENTRIES[1])
        append(ENTRIES[2])
    assert read_journal(path) == [ENTRIES[0], ENTRIES[2]]
    write(path, ENTRIES[1])
    assert len(read_journal(path)) == 3


@pytest.mark.parametrize("kept", range(1, 12))
def test_a_torn_last_line_does_not_count_and_the_next_entry_takes_its_place(kept: int, path: Path):
    write(path, *ENTRIES[:2])
    whole = path.read_bytes()
    line = json.dumps(ENTRIES[3]).encode()
    path.write_bytes(whole + line[:kept])
    assert read_journal(path) == ENTRIES[:2]
    write(path, ENTRIES[2])
    assert path.read_bytes() == whole + b"{}\n"


def test_a_last_line_that_lacks_no_more_than_its_end_does_not_count(path: Path):
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    assert read_journal(path) == [{"a": 1}]
    write(path)
    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_file_that_is_all_one_torn_line_begins_anew(path: Path):
    path.write_bytes(b'{"a": ')
    assert read_journal(path) == []
    write(path, {"a": 1})
    assert read_journal(path) == [{"a": 1}]


@pytest.mark.parametrize(
    "line", [b"not json", b"", b'{"a": 1', b'{"a": "\xff"}', b"[]", b"5", b"null", b"[" * 100_000]
)
def test_a_line_that_is_no_object_is_named_by_its_number(line: bytes, path: Path):
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    with raises(InvalidRequest, f"line 2 of {path}"):
        read_journal(path)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("{}\n")
    for path in (tmp_path, tmp_path / "file" / "journal.jsonl"):
        with raises(InvalidRequest, path):
            read_journal(path)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("{}\n")
    for path in (tmp_path, tmp_path / "file" / "journal.jsonl", tmp_path / "no" / "journal.jsonl"):
        with raises(InvalidRequest, path):
            write(path, {})


def test_a_disk_that_is_full_is_named_and_entries_stay(path: Path):
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
