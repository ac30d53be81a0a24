"""Rows of a measurement beside its output file, so that an interrupted run can be resumed."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.models import Progress
from paceline.storage.json_lines import Append, journal_path, resuming
from paceline.storage.validation import validated
from paceline_lab.bench.record import Record, Row

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


@contextlib.contextmanager
def open_journal(output: Path | None, head: Record) -> Iterator[Journal]:
    """Open the journal of `output`, with the rows of an interrupted run if there was one.

    `head` is the record of this run, without rows. Raises InvalidRequest as `resuming`.
    """
    about = {name: value for name, value in head.as_dict().items() if name not in _MAY_DIFFER}
    with resuming(output, about) as (entries, append):
        measured = [
            validated(_Entry, entry, f"line {number} of {journal_path(output)}")
            for number, entry in entries
        ]
        yield Journal({entry.key: entry.rows for entry in measured}, append)
