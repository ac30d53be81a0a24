"""The charts of a record: every chart whose measures the rows have, whatever the command.

A chart has groups (kinds of prompts, lengths, depths or blocks), one below the other, with a mark
per contender. It also has its values as a table. `drawing.py` draws it. This module depends on the
names of measures (`record.Row`), not on the look of charts, nor on files. Prefill and decode have
separate charts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, geometric_mean, median

from paceline.storage.report import Table
from paceline_lab.bench.ab_test import PLAIN, SINGLE_ROW
from paceline_lab.bench.record import Record, Row, Spread, spread

_AXES = {
    "prompt_tokens": "tokens of the prompt",
    "depth": "tokens of context before the question",
    "block": "rows of a block",
}
"""Labels for the numbers of `Row.at`."""

_SPEEDS = (
    ("ratio", "Speed over plain decoding", 1.0),
    ("ratio_own_plain", "Speed over its own plain decoding", 1.0),
    ("tokens_per_step", "Tokens per step (tau)", None),
)
_RATES = (
    ("decode_tokens_per_second", "Decode, tokens per second", None),
    ("prefill_tokens_per_second", "Prefill, tokens per second", None),
)
"""Measures for charts by a number alone: rates of different prompts have no mean."""


@dataclass(frozen=True, slots=True)
class Chart:
    slug: str
    title: str
    note: str
    """An explanation of the chart, in a sentence or two."""
    measure: str
    """Label of the x axis."""
    groups: Sequence[str]
    series: Mapping[str, Sequence[Spread | None]]
    """Name -> one value per group."""
    line: float | None = None
    """Value of the baseline."""

    @property
    def table(self) -> Table:
        """The values as a table: a line per group, a column per name."""
        columns = zip(*self.series.values(), strict=True)
        rows = [
            [group, *("" if spread is None else str(spread) for spread in column)]
            for group, column in zip(self.groups, columns, strict=True)
        ]
        return self.measure, ["", *self.series], rows


def record_charts(record: Record) -> list[Chart]:
    """Return the charts of a record, the most important first."""
    # Records made before 2026-11-27 have rows of first requests after loading ("cold").
    rows = [row for row in record.rows if row.at.get("state") != "cold"]
    axes = _axes(rows)
    charts = [
        _chart(rows, axis, *measure)
        for axis in axes or [""]
        for measure in (*_SPEEDS, *(_RATES if axes else ()))
    ]
    return [chart for chart in charts if chart is not None]


def _axes(rows: Sequence[Row]) -> list[str]:
    """Return the names in `Row.at` that have several numeric values."""
    values: dict[str, set[float]] = {}
    for row in rows:
        for name, value in row.at.items():
            if not isinstance(value, str):
                values.setdefault(name, set()).add(value)
    return [name for name, numbers in values.items() if len(numbers) > 1]


def _chart(
    rows: Sequence[Row], axis: str, measure: str, title: str, line: float | None
) -> Chart | None:
    """Return a measure's chart by a number, by kind of prompt, or by prompt for a single kind."""
    rows = [row for row in rows if measure in row.measures]
    what, by = _AXES.get(axis, axis), axis
    if not axis:
        by = "kind" if len({row.kind for row in rows}) > 1 else "case"
        what = "kind of prompt" if by == "kind" else "prompt"
    grouped: dict[str, dict[str, list[Row]]] = {}
    places = set[float]()
    for row in rows:
        place = row.at.get(axis, "") if axis else 0
        if isinstance(place, str):
            continue
        places.add(place)
        # Contenders that differ in the block alone share a mark.
        name = str(row.facts.get("way", row.contender)) if axis == "block" else row.contender
        group = f"{place:g}" if axis else str(getattr(row, by))
        grouped.setdefault(name, {}).setdefault(group, []).append(row)
    series = {
        name: of_groups
        for name, of_groups in grouped.items()
        if not _is_baseline(measure, [*chain(*of_groups.values())])
    }
    if not series:
        return None
    groups = [*dict.fromkeys(group for of_groups in series.values() for group in of_groups)]
    if axis:
        groups = [group for place in sorted(places) if (group := f"{place:g}") in groups]
    elif len(groups) > 1:
        groups = ["all", *groups]
        series = {name: {"all": [*chain(*one.values())], **one} for name, one in series.items()}
    return Chart(
        f"{measure}-by-{by if axis else what.partition(' ')[0]}",
        f"{title}, by {what}",
        _range_note(
            [rows for of_groups in series.values() for rows in of_groups.values()], measure
        ),
        title.lower(),
        groups,
        {
            name: [_joined(one[group], measure) if group in one else None for group in groups]
            for name, one in series.items()
        },
        line,
    )


def _joined(rows: Sequence[Row], measure: str) -> Spread:
    """Return a row's spread over its rounds, or the mean and range of several rows' medians.

    The mean is geometric for ratios, else arithmetic.
    """
    if len(rows) == 1:
        return spread(rows[0].measures[measure])
    middle = [median(row.measures[measure]) for row in rows]
    mean = geometric_mean(middle) if measure.startswith("ratio") else fmean(middle)
    return Spread(mean, min(middle), max(middle))


def _range_note(joined: Sequence[Sequence[Row]], measure: str) -> str:
    """Return a note that explains a mark and its line; `joined` has the rows per mark."""
    if any(len(rows) > 1 for rows in joined):
        return "The mean of the cases (geometric for ratios); lines show minimum and maximum."
    if all(len(row.measures[measure]) == 1 for rows in joined for row in rows):
        return "One value each."
    return "The median of the rounds; lines show minimum and maximum."


def _is_baseline(measure: str, rows: Sequence[Row]) -> bool:
    """Return True for the baseline: a ratio of 1, or one token per step without a drafter."""
    if measure == "ratio":
        return all(value == 1 for row in rows for value in row.measures[measure])
    return measure == "tokens_per_step" and rows[0].contender in (PLAIN, SINGLE_ROW)
