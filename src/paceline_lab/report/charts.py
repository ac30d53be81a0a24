"""The charts of a record: every chart that its rows have the measures for, whatever the command.

This module depends on the names of measures (`record.Row`), not on how charts look, nor on files.
Prefill is drawn apart from decode.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from operator import attrgetter
from statistics import fmean, geometric_mean, median

from paceline_lab.bench.ab_test import PLAIN, SINGLE_ROW
from paceline_lab.bench.record import Record, Row, Spread, spread
from paceline_lab.report.shapes import Chart, Curves, Dots

_OVER = {
    "prompt_tokens": "tokens of the prompt",
    "depth": "tokens of context before the question",
    "block": "rows of a block",
}
"""Axis labels for the numbers of `Row.at`."""

_CURVES = (
    ("ratio", "Speed over plain decoding", 1.0),
    ("tokens_per_step", "Tokens per step (tau)", None),
    ("decode_tokens_per_second", "Decode, tokens a second", None),
    ("prefill_tokens_per_second", "Prefill, tokens a second", None),
)
_OWN = ("ratio_own_plain", "Speed over its own plain decoding", 1.0)
"""Speed-up of a peer's own speculation."""
_MIN_DRAFTS = 5
"""Positions with fewer draft tokens are left out: their acceptance rate is noise."""


def record_charts(record: Record) -> list[Chart]:
    """The charts of a record, the most important first."""
    # Records made before 2026-11-27 have rows of first requests after loading ("cold").
    rows = [row for row in record.rows if row.at.get("state") != "cold"]
    charts: list[Chart] = []
    axes = _axes(rows)
    for axis in axes:
        charts += _curves(rows, axis)
    if not axes:
        charts += _by_group(rows)
    return [*charts, *_positions(rows)]


def _axes(rows: Sequence[Row]) -> list[str]:
    """Names in `Row.at` with several numeric values."""
    values: dict[str, set[float]] = {}
    for row in rows:
        for name, value in row.at.items():
            if not isinstance(value, str):
                values.setdefault(name, set()).add(value)
    return [name for name, numbers in values.items() if len(numbers) > 1]


def _curves(rows: Sequence[Row], place: str) -> Iterator[Chart]:
    for measure, title, line in _CURVES:
        groups: dict[str, dict[float, list[Row]]] = {}
        for row in rows:
            at = row.at.get(place, "")
            if measure not in row.measures or isinstance(at, str):
                continue
            # Contenders that differ in the block alone are one line.
            name = str(row.facts.get("way", row.contender)) if place == "block" else row.contender
            groups.setdefault(name, {}).setdefault(float(at), []).append(row)
        curves = {
            name: [(at, _joined(rows_at, measure)) for at, rows_at in sorted(places.items())]
            for name, places in groups.items()
            if not _is_baseline(measure, [row for rows_at in places.values() for row in rows_at])
        }
        joined = [rows_at for places in groups.values() for rows_at in places.values()]
        over = _OVER.get(place, place)
        if curves:
            yield Curves(
                f"{measure}-by-{place}",
                f"{title}, by {over}",
                _range_note(joined, measure),
                over,
                title.lower(),
                curves,
                line,
                digits=0 if measure == "prefill_tokens_per_second" else 2,
            )


def _by_group(rows: Sequence[Row]) -> Iterator[Chart]:
    """Speed-up and tokens per step by kind of prompt; by case if there is only one kind."""
    for measure, title, line in (*_CURVES[:2], _OWN):
        measured = [row for row in rows if measure in row.measures]
        kinds = list(dict.fromkeys(row.kind for row in measured))
        group_of: Callable[[Row], str] = attrgetter("kind" if len(kinds) > 1 else "case")
        groups = list(dict.fromkeys(map(group_of, measured)))
        names = [
            name
            for name in dict.fromkeys(row.contender for row in measured)
            if not _is_baseline(measure, [row for row in measured if row.contender == name])
        ]
        if not names:
            continue
        dots: dict[str, list[Spread | None]] = {}
        joined: list[Sequence[Row]] = []
        for name in names:
            contender_rows = [row for row in measured if row.contender == name]
            columns = [
                [row for row in contender_rows if group_of(row) == group] for group in groups
            ]
            joined += columns
            columns = [contender_rows, *columns] if len(groups) > 1 else columns
            dots[name] = [_joined(column, measure) if column else None for column in columns]
        what = "kind of prompt" if len(kinds) > 1 else "prompt"
        yield Dots(
            f"{measure}-by-{what.split(maxsplit=1)[0]}",
            f"{title}, by {what}",
            _range_note(joined, measure),
            title.lower(),
            ["all", *groups] if len(groups) > 1 else groups,
            dots,
            line,
            log=measure.startswith("ratio"),
        )


def _positions(rows: Sequence[Row]) -> Iterator[Chart]:
    """Acceptance rate by position in the draft."""
    curves = {}
    for name in dict.fromkeys(row.contender for row in rows):
        contender_rows = [row for row in rows if row.contender == name]
        drafted = _summed(contender_rows, "drafted_at")
        accepted = _summed(contender_rows, "accepted_at")
        points = [
            (place, _single(accepted_here / tried))
            for place, (tried, accepted_here) in enumerate(
                zip_longest(drafted, accepted, fillvalue=0), start=1
            )
            if tried >= _MIN_DRAFTS
        ]
        if points:
            curves[name] = points
    if curves:
        yield Curves(
            "acceptance-by-position",
            "Acceptance rate by position in the draft",
            "The share of the draft tokens at a position that were accepted, with all before them; "
            f"positions with under {_MIN_DRAFTS} draft tokens are left out. Long drafts are made "
            "where acceptance is likely, so a line may rise.",
            "position in the draft",
            "acceptance rate",
            curves,
            spacing="linear",
        )


def _joined(rows: Sequence[Row], measure: str) -> Spread:
    """Spread of a row over its rounds; of several rows the mean and range of their medians.

    The mean is geometric for ratios, else arithmetic.
    """
    if len(rows) == 1:
        return spread(rows[0].measures[measure])
    middle = [median(row.measures[measure]) for row in rows]
    mean = geometric_mean(middle) if measure.startswith("ratio") else fmean(middle)
    return Spread(mean, min(middle), max(middle))


def _range_note(joined: Sequence[Sequence[Row]], measure: str) -> str:
    """Note on what a mark and its line show; `joined` has the rows per mark."""
    if any(len(rows) > 1 for rows in joined):
        return "The mean of the cases (geometric for ratios); lines from the least to the most."
    if all(len(row.measures[measure]) == 1 for rows in joined for row in rows):
        return "One value each."
    return "The median of the rounds; lines from the least round to the most."


def _is_baseline(measure: str, rows: Sequence[Row]) -> bool:
    """True for the baseline: a ratio of 1, or one token per step without a drafter."""
    if measure == "ratio":
        return all(value == 1 for row in rows for value in row.measures[measure])
    return measure == "tokens_per_step" and rows[0].contender in (PLAIN, SINGLE_ROW)


def _summed(rows: Sequence[Row], name: str) -> list[int]:
    sums: list[int] = []
    for row in rows:
        counts = row.counts.get(name, [])
        if isinstance(counts, list):
            sums = [a + b for a, b in zip_longest(sums, counts, fillvalue=0)]
    return sums


def _single(value: float) -> Spread:
    return Spread(value, value, value)
