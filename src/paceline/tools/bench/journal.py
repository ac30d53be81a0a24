"""Measurements kept one by one beside the output, so that a stopped run goes on where it was.

The journal's first entry says what is measured, with what and where; another run's is not gone on
with. Whoever writes the result removes it (`Report.journal`).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.storage.json_lines import Append, appending, read_journal
from paceline.tools.bench.record import Record, Row, row_of
from paceline.tools.bench.record_faults import row_faults

_NOT_ASKED = ("made", "command", "summary", "rows")
"""What two processes of one run need not have in common."""


class Journal:
    """What has been measured so far, piece by piece.

    A piece is what belongs together: mostly a case, with all its variants and rounds.
    """

    def __init__(self, done: Mapping[str, list[Row]], append: Append) -> None:
        self._done = dict(done)
        self._append = append

    def get(self, key: str) -> list[Row] | None:
        """The rows of a piece; None where it has not been measured."""
        return self._done.get(key)

    def add(self, key: str, rows: Sequence[Row]) -> list[Row]:
        """Keep the rows of a piece: they are there for good when the call returns."""
        self._append({"key": key, "rows": [row.as_dict() for row in rows]})
        self._done[key] = [*rows]
        return self._done[key]


def journal_path(output: Path | None) -> Path | None:
    """Where the journal of a result is; None without an output: then nothing is kept."""
    return None if output is None else output.with_name(f"{output.name}.journal")


@contextlib.contextmanager
def open_journal(output: Path | None, head: Record) -> Iterator[Journal]:
    """What an interrupted run for `output` has measured already, and a place for more.

    Args:
        output: where the result will be written; None: nothing is kept.
        head: the record to be made, with no rows yet.

    Raises:
        InvalidRequest: the journal cannot be read or written, or is that of another run.
    """
    path = journal_path(output)
    if path is None:
        yield Journal({}, lambda _: None)
        return
    about = {name: each for name, each in head.as_dict().items() if name not in _NOT_ASKED}
    entries = read_journal(path, {})
    with appending(path) as append:
        if entries:
            check_same(path, entries[0].get("about"), about)
        else:
            append({"about": about})
        yield Journal(dict(_done(path, entries[1:])), append)


def check_same(path: Path, here: Any, about: Mapping[str, Any]) -> None:
    """Raise InvalidRequest where a journal begins with something else than `about`."""
    if not isinstance(here, dict):
        raise InvalidRequest(f"{path} is no journal of `paceline bench`; choose another output")
    for name in about:
        if here.get(name) != about[name]:
            was, now = _differing(here.get(name), about[name])
            raise InvalidRequest(
                f"{path} has an interrupted run with another {name} ({was}, not {now}); go on as "
                "it was begun, remove it, or choose another output"
            )


def _differing(was: Any, now: Any) -> tuple[str, str]:
    """Both values, or where both are objects what differs in them."""
    if isinstance(was, dict) and isinstance(now, dict):
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return (
            ", ".join(f"{name} {was.get(name)}" for name in names),
            ", ".join(f"{name} {now.get(name)}" for name in names),
        )
    return str(was), str(now)


def _done(path: Path, entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Row]]]:
    for number, entry in enumerate(entries, start=2):
        rows = entry.get("rows")
        if not (
            isinstance(entry.get("key"), str)
            and isinstance(rows, list)
            and not any(fault for row in rows for fault in row_faults(row))
        ):
            raise InvalidRequest(f"line {number} of {path} is no measurement; remove the file")
        yield entry["key"], [row_of(row) for row in rows]
