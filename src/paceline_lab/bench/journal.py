"""Saves the rows of a measurement next to its output file, so that a run can be resumed.

The first entry describes the run: options, model, engine, machine. The journal of a different run
is rejected. The command deletes the journal after writing the result (`Report.journal`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.journals import Append, appending, read_journal
from paceline.storage.validation import validated
from paceline_lab.bench.record import Record, Row

_MAY_DIFFER = ("made", "command", "summary", "rows")
"""Fields of the head that may differ between two processes of one run."""


def journal_path(output: Path | None) -> Path | None:
    """Return the path of an output's journal, or None without an output."""
    return None if output is None else output.with_name(f"{output.name}.journal")


class Journal:
    """Measured rows of a run by key: usually a case's id, with the rows of all contenders."""

    def __init__(self, rows: Mapping[str, list[Row]], append: Append = lambda _: None) -> None:
        self._rows = {**rows}
        self._append = append

    def get(self, key: str) -> list[Row] | None:
        return self._rows.get(key)

    def add(self, key: str, rows: Sequence[Row]) -> None:
        """Add rows; they are on disk when the method returns."""
        self._append({"key": key, "value": [row.as_dict() for row in rows]})
        self._rows[key] = [*rows]


@contextmanager
def open_journal(output: Path | None, head: Record) -> Iterator[Journal]:
    """Open the journal of `output`, with the rows of an interrupted run if there was one.

    `head` is the record of this run, without rows. Without an `output` nothing is written. Raises
    InvalidRequest if the journal cannot be read or written, or belongs to a different run.
    """
    path = journal_path(output)
    if path is None:
        yield Journal({})
        return
    about = {name: value for name, value in head.as_dict().items() if name not in _MAY_DIFFER}
    entries = read_journal(path)
    with appending(path) as append:
        if entries:
            _check_same_run(path, entries[0][1].get("about"), about)
        else:
            append({"about": about})
        rows = {
            str(entry.get("key")): validated(list[Row], entry.get("value"), where)
            for where, entry in entries[1:]
        }
        yield Journal(rows, append)


def _check_same_run(path: Path, recorded: Any, about: Mapping[str, Any]) -> None:
    if not isinstance(recorded, dict):
        raise InvalidRequest(f"{path} is not a journal of `paceline bench`; choose another output")
    for name in about:
        if recorded.get(name) != about[name]:
            was, now = _differing(recorded.get(name), about[name])
            raise InvalidRequest(
                f"{path} has an interrupted run with another {name} ({was}, not {now}); resume "
                "it with the same options, remove it, or choose another output"
            )


def _differing(was: Any, now: Any) -> tuple[str, str]:
    """Return both values; for two objects, only the fields that differ."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return str(was), str(now)
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    first, second = (", ".join(f"{n} {value.get(n)}" for n in names) for value in (was, now))
    return first, second


def measured_rows(
    journal: Journal, key: str, measure: Callable[[], list[Row]], progress: Progress, place: str
) -> list[Row]:
    """Return the rows of a key, measured if they are new; report their median ratios in one line.

    `place` is the progress of the run, such as `3/20`.
    """
    known = journal.get(key)
    rows = known or measure()
    if not known:
        journal.add(key, rows)
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.contender != rows[0].contender and "ratio" in row.measures:
            ratios.setdefault(row.contender, []).extend(row.measures["ratio"])
    text = "; ".join(f"{contender} {median(values):.2f}" for contender, values in ratios.items())
    progress.note(f"{place} {key}: {text}{' (measured before)' if known else ''}")
    return rows
