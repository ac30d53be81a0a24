"""Rows of a measurement beside its output file, so that an interrupted run can be resumed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

from paceline.models import Progress
from paceline_lab.bench.record import Record, Row
from paceline_lab.journals import Journal, resuming

_MAY_DIFFER = ("made", "command", "summary", "rows")
"""Fields of the head in which two processes of one run may differ."""


def open_journal(output: Path | None, head: Record) -> AbstractContextManager[Journal]:
    """Open the journal of `output`: mostly a case's id, with rows of all contenders.

    `head` is the record of this run, without rows. Raises InvalidRequest as `resuming`.
    """
    about = {name: value for name, value in head.as_dict().items() if name not in _MAY_DIFFER}
    return resuming(output, about)


def measured_rows(
    journal: Journal, key: str, measure: Callable[[], list[Row]], progress: Progress, place: str
) -> list[Row]:
    """Rows of a key, measured if they are new; reports their median ratios in one line.

    `place` is how far the run is, as `3/20`.
    """
    known = journal.get(key, list[Row])
    rows = known or measure()
    if not known:
        journal.add(key, [row.as_dict() for row in rows])
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.contender != rows[0].contender and "ratio" in row.measures:
            ratios.setdefault(row.contender, []).extend(row.measures["ratio"])
    text = "; ".join(f"{contender} {median(values):.2f}" for contender, values in ratios.items())
    progress.say(f"{place} {key}: {text}{' (measured before)' if known else ''}")
    return rows
