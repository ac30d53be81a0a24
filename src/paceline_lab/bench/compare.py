"""`bench compare`: two records side by side, with the first as the baseline.

The measure is mostly a ratio to plain decoding, so records of two machines or days can be compared.
Rounds of two runs are independent: the range of a quotient is from the minimum of one over the
maximum of the other to the reverse. Invariant: records with different models, prompts or answer
lengths are rejected without `force`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest
from paceline.storage.report import Report
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.record import Record, Spread, read_record


class Line(NamedTuple):
    """A contender's case, with its value in both results."""

    case: str
    kind: str
    contender: str
    before: Spread
    after: Spread

    @property
    def quotient(self) -> Spread:
        first, second = self.before, self.after
        return Spread(
            second.median / first.median,
            second.min_value / first.max_value,
            second.max_value / first.min_value,
        )


def bench_compare(before: Path, after: Path, *, measure: str, force: bool) -> Report:
    """Compare two results, case by case.

    With `force`, the model, prompts and answer length may differ. Raises InvalidRequest if a file
    is invalid, or the results cannot be compared.
    """
    paths = before, after
    first, second = map(read_record, paths)
    if not force:
        _check_alike(before, first, after, second)
    lines = [*_lines(first, second, measure)]
    if not lines:
        count = sum(measure in row.measures for one in (first, second) for row in one.rows)
        raise InvalidRequest(
            f"no case has {measure} by the same contender in {before} and {after}; {measure} is in "
            f"{count} rows"
        )
    means = [*_means(lines)]
    value = {
        "measure": measure,
        "results": [_about(before, first), _about(after, second)],
        "means": [
            {"contender": contender, "kind": kind, "quotient": mean.as_dict()}
            for contender, kind, mean in means
        ],
        "rows": [
            {
                **{"case": line.case, "kind": line.kind, "contender": line.contender},
                **{"before": line.before.as_dict(), "after": line.after.as_dict()},
                "quotient": line.quotient.as_dict(),
            }
            for line in lines
        ],
    }
    tables = [
        (
            f"{measure}: geometric mean of the cases (minimum to maximum case)",
            ["contender", "kind", "B / A, of cases"],
            [[contender, kind, str(mean)] for contender, kind, mean in means],
        ),
        (
            f"{measure}: median (minimum to maximum)",
            ["case", "contender", "A", "B", "B / A"],
            [[one.case, one.contender, *map(str, (*one[3:], one.quotient))] for one in lines],
        ),
    ]
    return Report(value, text=f"A: {before}\nB: {after}", tables=tables)


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
                f"{str(base_value)[:12]}); --force compares them anyway"
            )


def _lines(first: Record, second: Record, measure: str) -> Iterator[Line]:
    """Yield cases and contenders that both results have, in the order of the first one."""
    others = {row.key: row for row in second.rows}
    for row in first.rows:
        if measure == "ratio" and row.contender == PLAIN:
            continue  # the baseline: always 1
        before = row.spread(measure)
        after = others[row.key].spread(measure) if row.key in others else None
        if before and after and min(before.min_value, after.min_value) > 0:
            yield Line(row.case, row.kind, row.contender, before, after)


def _means(lines: Sequence[Line]) -> Iterator[tuple[str, str, Spread]]:
    """Yield contender, kind or `all`, and the geometric mean and range of its cases' quotients."""
    for contender in dict.fromkeys(line.contender for line in lines):
        own = [line for line in lines if line.contender == contender]
        kinds = dict.fromkeys(line.kind for line in own)
        for kind in [*(kinds if len(kinds) > 1 else ()), "all"]:
            ratios = [line.quotient.median for line in own if kind in (line.kind, "all")]
            yield contender, kind, Spread(geometric_mean(ratios), min(ratios), max(ratios))


def _about(path: Path, record: Record) -> dict[str, Any]:
    head = record.as_dict()
    names = ("kind", "made", "command", "paceline", "machine", "model", "suite_sha256")
    return {"file": str(path), **{name: head[name] for name in names}}
