"""Journals of measurements beside the output file, so that an interrupted run can be resumed.

The first entry describes the run: options, model, engine, machine. A journal of another run is
rejected. The CLI deletes the journal once it has written the result (`Report.journal`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench.record import Record, Row
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.json_lines import Append, appending, read_journal
from paceline.storage.validation import validated

_MAY_DIFFER = ("made", "command", "summary", "rows")
"""Fields of the head in which two processes of one run may differ."""


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    rows: list[Row]


class Journal:
    """Rows measured so far, by key: mostly a case's id, with rows of all contenders."""

    def __init__(self, done: Mapping[str, list[Row]], append: Append) -> None:
        self._done = dict(done)
        self._append = append

    def get(self, key: str) -> list[Row] | None:
        """Rows of a key; None if they have not been measured."""
        return self._done.get(key)

    def add(self, key: str, rows: Sequence[Row]) -> list[Row]:
        """Add the rows of a key; they are on disk when the call returns."""
        self._append({"key": key, "rows": [row.as_dict() for row in rows]})
        self._done[key] = [*rows]
        return self._done[key]

    def get_or_measure(
        self, key: str, measure: Callable[[], list[Row]], progress: Progress, place: str
    ) -> list[Row]:
        """Rows of a key, measured if they are new; reports their median ratios in one line.

        `place` is how far the run is, as `3/20`.
        """
        known = self.get(key)
        rows = known or self.add(key, measure())
        ratios = "; ".join(
            f"{row.contender} {median(row.measures['ratio']):.2f}"
            for row in rows[1:]
            if "ratio" in row.measures
        )
        progress.say(f"{place} {key}: {ratios}{' (measured before)' if known else ''}")
        return rows


def journal_path(output: Path | None) -> Path | None:
    """Path of an output's journal; None without an output."""
    return None if output is None else output.with_name(f"{output.name}.journal")


@contextlib.contextmanager
def open_journal(output: Path | None, head: Record) -> Iterator[Journal]:
    """Open the journal of `output`, with the rows of an interrupted run if there was one.

    `head` is the record of this run, without rows. Raises InvalidRequest: see `resuming`.
    """
    about = {name: value for name, value in head.as_dict().items() if name not in _MAY_DIFFER}
    with resuming(output, about) as (entries, append):
        measured = [
            validated(_Entry, entry, f"line {number} of {journal_path(output)}")
            for number, entry in entries
        ]
        yield Journal({entry.key: entry.rows for entry in measured}, append)


@contextlib.contextmanager
def resuming(
    output: Path | None, about: Mapping[str, Any]
) -> Iterator[tuple[list[tuple[int, dict[str, Any]]], Append]]:
    """Yield (line number, entry) of an interrupted run, and a function that appends an entry.

    `about`, the first entry, describes the run. Without an `output` there are no entries, and none
    are appended. Raises InvalidRequest if the journal cannot be read or written, or it is another
    run's.
    """
    path = journal_path(output)
    if path is None:
        yield [], lambda _: None
        return
    entries = read_journal(path)
    with appending(path) as append:
        if entries:
            _check_same_run(path, entries[0].get("about"), about)
        else:
            append({"about": dict(about)})
        yield [*enumerate(entries[1:], start=2)], append


def _check_same_run(path: Path, recorded: Any, about: Mapping[str, Any]) -> None:
    if not isinstance(recorded, dict):
        raise InvalidRequest(f"{path} is no journal of `paceline bench`; choose another output")
    for name in about:
        if recorded.get(name) != about[name]:
            was, now = _differing(recorded.get(name), about[name])
            raise InvalidRequest(
                f"{path} has an interrupted run with another {name} ({was}, not {now}); resume "
                "it with the same options, remove it, or choose another output"
            )


def _differing(was: Any, now: Any) -> tuple[str, str]:
    """Both values; of two objects only the fields that differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return (
            ", ".join(f"{name} {was.get(name)}" for name in names),
            ", ".join(f"{name} {now.get(name)}" for name in names),
        )
    return str(was), str(now)
