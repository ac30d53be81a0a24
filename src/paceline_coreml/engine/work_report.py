"""When drafting pays, from the work of an engine's calls alone: MACs and bytes of weights by part.

Counts are not times. They give two bounds for a device: if calls are memory-bound, time goes by the
bytes of weights, and a further row is nearly free; if they are compute-bound, time goes by the
multiply-accumulates (MACs), and every row costs the same. Only measured costs show which bound a
device is close to (`paceline plan`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paceline.decoding.costs import CostTable, break_even
from paceline.storage.report import Table
from paceline_coreml.engine.flops import Parts, Work, total

WHOLE = "the graph as it is"
CHOSEN = "only experts that a row has"

_UNITS = {"macs": "MACs", "weight_bytes": "bytes"}
"""Field of `Work` -> unit."""


class Bound(NamedTuple):
    """Cost of a call if its time is proportional to one of the counts."""

    computed: str
    by: str
    rows: int
    ratio: float
    """Cost over that of the call with the fewest rows, mostly 1."""
    break_even: float | None
    """Acceptance chance per draft token at which the block breaks even; None: never."""


def _calls(work: Work) -> Mapping[str, Mapping[int, Parts]]:
    """Work of the whole graph, and of only the experts that rows use if they do not use all."""
    if work.chosen in ({}, work.whole):
        return {WHOLE: work.whole}
    return {WHOLE: work.whole, CHOSEN: work.chosen}


def bounds(work: Work) -> Iterator[Bound]:
    """Break-even of drafting, by bytes and by MACs, for every entry of `_calls`."""
    for computed, calls in _calls(work).items():
        for unit, by in _UNITS.items():
            cost = CostTable({rows: getattr(total(parts), unit) for rows, parts in calls.items()})
            fewest, *more = cost.seconds
            for rows in more:
                ratio = cost(rows) / cost(fewest)
                yield Bound(computed, by, rows, ratio, break_even(cost, rows))


def as_dict(work: Work) -> dict[str, Any]:
    """JSON of the work and its bounds."""
    return {
        "calls": {
            computed: {
                str(rows): {part: done._asdict() for part, done in parts.items()}
                for rows, parts in calls.items()
            }
            for computed, calls in _calls(work).items()
        },
        "pays": [bound._asdict() for bound in bounds(work)],
    }


def tables(work: Work) -> Iterator[Table]:
    """Work by part and rows, and the break-even of drafting, to print."""
    for computed, calls in _calls(work).items():
        yield f"work of a call, {computed}", *_by_part(calls)
    if all_bounds := list(bounds(work)):
        head = ["computed", "if time goes by", "rows", "/ fewest rows", "break-even p"]
        yield "when drafting pays, at both ends", head, [_row(bound) for bound in all_bounds]


def _by_part(calls: Mapping[int, Parts]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: counts by rows, their growth, and every part's share of the longest call."""
    fewest, most = min(calls), max(calls)
    sums = {rows: total(parts) for rows, parts in calls.items()}
    head, table = ["part"], [[part] for part in (*calls[most], "all")]
    for unit, by in _UNITS.items():
        head += [f"{by}, {rows} row{'s' * (rows > 1)}" for rows in calls]
        head += [*([f"/ {fewest}"] if fewest < most else []), "share"]
        for row in table:
            counts = {
                rows: getattr(parts.get(row[0], sums[rows]), unit) for rows, parts in calls.items()
            }
            row += [_short(count) for count in counts.values()]
            if fewest < most:
                row.append(f"{counts[most] / counts[fewest]:.2f}" if counts[fewest] else "")
            row.append(f"{100 * counts[most] / getattr(sums[most], unit):.1f} %")
    return head, table


def _row(bound: Bound) -> list[str]:
    even = "never" if bound.break_even is None else f"{bound.break_even:.2f}"
    return [bound.computed, bound.by, str(bound.rows), f"{bound.ratio:.2f}", even]


def _short(count: int) -> str:
    """Three digits, with a letter for thousands, millions, ..."""
    if count < _THOUSAND:
        return str(count)
    value, letters = float(count), iter("kMGT")
    while value >= _THOUSAND:
        value, letter = value / _THOUSAND, next(letters)
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {letter}"


_THOUSAND = 1000
