"""`bench compare`: records side by side, with the first as the baseline.

The measure is mostly a ratio to plain decoding, so records of two machines or days can be compared.
Rounds of two runs are independent, so the range of a quotient is from the least of one over the
most of the other to the reverse. Invariant: without `anyway`, records of another model, other
prompts or another answer length are rejected.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest
from paceline.storage.report import Report, Table
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.record import Record, Row, Spread, read_record


class Line(NamedTuple):
    """A case by a contender, with its value in every result."""

    case: str
    kind: str
    contender: str
    spreads: Sequence[Spread]
    """One per result."""

    def over_first(self, place: int) -> Spread:
        """Value of the result at index `place` over the first one's."""
        base, other = self.spreads[0], self.spreads[place]
        return Spread(other.median / base.median, other.least / base.most, other.most / base.least)


def bench_compare(paths: Sequence[Path], *, measure: str, anyway: bool) -> Report:
    """Compare two results or more, case by case.

    With `anyway` also results of another model, other prompts or another answer length. Raises
    InvalidRequest if a file is invalid, or the results cannot be compared.
    """
    if len(paths) < 2:
        raise InvalidRequest("bench compare needs two results or more")
    records = [read_record(path) for path in paths]
    if not anyway:
        for path, record in zip(paths[1:], records[1:], strict=True):
            _check_alike(paths[0], records[0], path, record)
    lines = list(_lines(records, measure))
    if not lines:
        raise InvalidRequest(
            f"no case has {measure} by the same contender in all of "
            f"{', '.join(map(str, paths))}; {measure} is in "
            f"{sum(measure in row.measures for record in records for row in record.rows)} rows"
        )
    names = [f"{chr(ord('A') + place)}: {path}" for place, path in enumerate(paths)]
    value = {
        "measure": measure,
        "results": [_about(path, record) for path, record in zip(paths, records, strict=True)],
        "means": [
            {"contender": contender, "kind": kind, "over_first": [s._asdict() for s in over]}
            for contender, kind, over in _means(lines, len(paths))
        ],
        "rows": [_row(line) for line in lines],
    }
    tables = [_mean_table(lines, names, measure), _case_table(lines, names, measure)]
    return Report(value, text="\n".join(names), tables=tables)


def _check_alike(first: Path, base: Record, path: Path, other: Record) -> None:
    fingerprints = [(record.model or {}).get("fingerprint") for record in (base, other)]
    answers = [record.settings.get("max_tokens") for record in (base, other)]
    for difference, (base_value, other_value) in (
        ("another model", fingerprints),
        ("other prompts", (base.suite_sha256, other.suite_sha256)),
        ("answers of another length", answers),
    ):
        if base_value != other_value:
            raise InvalidRequest(
                f"{path} was measured with {difference} than {first} ({str(other_value)[:12]}, not "
                f"{str(base_value)[:12]}); --anyway compares them nevertheless"
            )


def _lines(records: Sequence[Record], measure: str) -> Iterator[Line]:
    """Cases and contenders that all results have, in the order of the first one."""
    by_key: list[dict[tuple[str, str], Row]] = [
        {row.key: row for row in record.rows} for record in records
    ]
    for key, first in by_key[0].items():
        if measure == "ratio" and first.contender == PLAIN:
            continue  # the baseline: always 1
        rows = [record_rows.get(key) for record_rows in by_key]
        measured = [row.spread(measure) for row in rows if row is not None]
        spreads = [spread for spread in measured if spread is not None and spread.least > 0]
        if len(spreads) == len(records):
            yield Line(first.case, first.kind, first.contender, spreads)


def _means(lines: Sequence[Line], results: int) -> Iterator[tuple[str, str, list[Spread]]]:
    """(contender, kind or `all`, one spread over the cases per further result, of its quotients).

    The `median` of these spreads is the geometric mean.
    """
    for contender in dict.fromkeys(line.contender for line in lines):
        contender_lines = [line for line in lines if line.contender == contender]
        kinds = dict.fromkeys(line.kind for line in contender_lines)
        for kind in [*(kinds if len(kinds) > 1 else ()), "all"]:
            chosen = [line for line in contender_lines if kind in (line.kind, "all")]
            quotients = [
                [line.over_first(place).median for line in chosen] for place in range(1, results)
            ]
            yield (
                contender,
                kind,
                [Spread(geometric_mean(ratios), min(ratios), max(ratios)) for ratios in quotients],
            )


def _about(path: Path, record: Record) -> dict[str, Any]:
    head = record.as_dict()
    names = ("kind", "made", "command", "paceline", "machine", "model", "suite_sha256")
    return {"file": str(path), **{name: head[name] for name in names}}


def _row(line: Line) -> dict[str, Any]:
    return {
        "case": line.case,
        "kind": line.kind,
        "contender": line.contender,
        "found": [spread._asdict() for spread in line.spreads],
        "over_first": [line.over_first(n)._asdict() for n in range(1, len(line.spreads))],
    }


def _mean_table(lines: Sequence[Line], names: Sequence[str], measure: str) -> Table:
    letters = [name[0] for name in names]
    head = ["contender", "kind", *(f"{letter} / A, of cases" for letter in letters[1:])]
    rows = [
        [contender, kind, *map(str, over)] for contender, kind, over in _means(lines, len(names))
    ]
    return f"{measure}: geometric mean of the cases (least to most of a case)", head, rows


def _case_table(lines: Sequence[Line], names: Sequence[str], measure: str) -> Table:
    letters = [name[0] for name in names]
    head = ["case", "contender", *letters, *(f"{letter} / A" for letter in letters[1:])]
    rows = [
        [
            line.case,
            line.contender,
            *map(str, line.spreads),
            *(str(line.over_first(place)) for place in range(1, len(names))),
        ]
        for line in lines
    ]
    return f"{measure}: median (least to most)", head, rows
