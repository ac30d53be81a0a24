"""What the work of an engine's calls says of drafting, before any device was timed.

Knows counts: multiply-accumulates (MACs) and bytes of weights, by part. The rule: counts are not
times. They give the two ends between which a device is that has nothing else to do: where time goes
by the bytes that are read, a further row is free; where it goes by the MACs, it costs what a row
costs. Which end a device is near to only its clock says (`plan.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from paceline.decoding.costs import CostTable, break_even
from paceline.engines.coreml.flops import Parts, Work, total

WHOLE = "the graph as it is"
CHOSEN = "only experts that a row has"

_UNITS = {"macs": "MACs", "weight_bytes": "bytes"}
"""What is counted, and how it is called."""


@runtime_checkable
class CountsWork(Protocol):
    """An engine that can say what its calls do."""

    def work(self) -> Work:
        """By numbers of rows, and by part."""
        ...


class End(NamedTuple):
    """One end: what a call costs if time goes by one of the counts alone."""

    computed: str
    by: str
    rows: int
    ratio: float
    """Of a call with so many rows to one with the fewest there are, mostly 1."""
    break_even: float | None
    """The chance per draft token at which drafting so far pays; None: it never does."""


def ways(work: Work) -> Mapping[str, Mapping[int, Parts]]:
    """The graph's own work, and that with fewer experts where rows do not have them all."""
    if work.chosen in ({}, work.whole):
        return {WHOLE: work.whole}
    return {WHOLE: work.whole, CHOSEN: work.chosen}


def ends(work: Work) -> Iterator[End]:
    """When drafting pays, for each way to compute a call, by bytes and by MACs."""
    for computed, calls in ways(work).items():
        for unit, by in _UNITS.items():
            cost = CostTable({rows: getattr(total(parts), unit) for rows, parts in calls.items()})
            fewest, *more = cost.seconds
            for rows in more:
                ratio = cost(rows) / cost(fewest)
                yield End(computed, by, rows, ratio, break_even(cost, rows))


def as_dict(work: Work) -> dict[str, Any]:
    """For JSON."""
    return {
        "calls": {
            computed: {
                str(rows): {part: done._asdict() for part, done in parts.items()}
                for rows, parts in calls.items()
            }
            for computed, calls in ways(work).items()
        },
        "pays": [end._asdict() for end in ends(work)],
    }


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, head, rows."""


def tables(work: Work) -> Iterator[Table]:
    """For people: what each part does, by rows, and when drafting pays."""
    for computed, calls in ways(work).items():
        yield f"work of a call, {computed}", *_by_part(calls)
    if found := list(ends(work)):
        head = ["computed", "if time goes by", "rows", "/ fewest rows", "break-even p"]
        yield "when drafting pays, at both ends", head, [_row(end) for end in found]


def _by_part(calls: Mapping[int, Parts]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: counts by rows, how they grow, and each part's share of the longest call."""
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


def _row(end: End) -> list[str]:
    even = "never" if end.break_even is None else f"{end.break_even:.2f}"
    return [end.computed, end.by, str(end.rows), f"{end.ratio:.2f}", even]


def _short(count: int) -> str:
    """With three digits, and a letter for thousands, millions, ..."""
    if count < _THOUSAND:
        return str(count)
    value, letters = float(count), iter("kMGT")
    while value >= _THOUSAND:
        value, letter = value / _THOUSAND, next(letters)
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {letter}"


_THOUSAND = 1000
