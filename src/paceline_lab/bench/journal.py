"""Saves the rows of a measurement next to its output file, so that a run can be resumed.

The first entry describes the run: options, model, engine, machine. The journal of a different run
is rejected. The command deletes the journal after writing the result.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.journals import appending, journal_of, read_journal
from paceline.storage.validation import validated
from paceline_lab.bench.record import Record, Row

_MAY_DIFFER = ("made", "command", "summary", "rows")
"""Fields of the head that may differ between two processes of one run."""

Measured = Callable[[str, Callable[[], list[Row]], str], list[Row]]
"""Key, function that measures its rows, progress of the run such as `3/20` -> the key's rows."""


@contextmanager
def open_journal(output: Path | None, head: Record, progress: Progress) -> Iterator[Measured]:
    """Yield a function that returns rows: measured, or from the journal of an interrupted run.

    A key is usually a case's id, with the rows of all contenders. New rows are on disk when the
    function returns, and their median ratios are reported in one line.

    `head` is the record of this run, without rows. Without an `output` nothing is written. Raises
    InvalidRequest if the journal cannot be read or written, or belongs to a different run.
    """
    known, append = dict[str, list[Row]](), None

    def measured(key: str, measure: Callable[[], list[Row]], place: str) -> list[Row]:
        rows = known.get(key) or measure()
        if append and key not in known:
            append({"key": key, "value": [row.as_dict() for row in rows]})
        ratios: dict[str, list[float]] = {}
        for row in rows:
            if row.contender != rows[0].contender and "ratio" in row.measures:
                ratios.setdefault(row.contender, []).extend(row.measures["ratio"])
        text = "; ".join(f"{name} {median(values):.2f}" for name, values in ratios.items())
        progress.note(f"{place} {key}: {text}{' (measured before)' if key in known else ''}")
        return rows

    with ExitStack() as stack:
        if output is not None:
            path = journal_of(output)
            head_fields = head.as_dict().items()
            about = {name: value for name, value in head_fields if name not in _MAY_DIFFER}
            entries = read_journal(path)
            append = stack.enter_context(appending(path))
            if entries:
                _check_same_run(path, entries[0][1].get("about"), about)
            else:
                append({"about": about})
            for where, entry in entries[1:]:
                rows = validated(list[Row], entry.get("value"), where)
                known[str(entry.get("key"))] = rows
        yield measured


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
