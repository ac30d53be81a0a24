"""Aggregates of rows: geometric means of the medians over the rounds, and tables to print."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from paceline.storage.report import Table
from paceline_lab.bench.ab_test import PLAIN, SINGLE_ROW
from paceline_lab.bench.record import Row


def means(
    rows: Sequence[Row], measure: str = "ratio", kind: str | None = None
) -> Mapping[str, float]:
    """Contender -> geometric mean of a measure's medians, over all rows or those of a kind.

    Rows without the measure do not count; a contender without other rows is left out.
    """
    medians: dict[str, list[float]] = {}
    for row in rows:
        if measure in row.measures and kind in (None, row.kind):
            medians.setdefault(row.contender, []).append(median(row.measures[measure]))
    return {name: geometric_mean(values) for name, values in medians.items()}


def worst(rows: Sequence[Row], contender: str) -> float:
    """Least median ratio of a contender in any case."""
    return min(
        median(row.measures["ratio"])
        for row in rows
        if row.contender == contender and "ratio" in row.measures
    )


def all_same_tokens(rows: Sequence[Row]) -> bool:
    """True if all tokens equal plain decoding's, except those of the single-row baseline."""
    return all(row.facts["same_tokens"] for row in rows if row.contender != SINGLE_ROW)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Means over all cases and by kind, and the worst case, for a record."""
    kinds = dict.fromkeys(row.kind for row in rows)
    return {
        "same_tokens": all_same_tokens(rows),
        "geometric_means": means(rows),
        "geometric_means_single_row": means(rows, "ratio_single_row"),
        "by_kind": {kind: means(rows, kind=kind) for kind in kinds},
        "worst": {name: worst(rows, name) for name in means(rows)},
    }


def kind_table(rows: Sequence[Row]) -> Table:
    """Geometric means by kind of prompt."""
    all_means, single = means(rows), means(rows, "ratio_single_row")
    names = [name for name in all_means if name != PLAIN]
    lines = []
    for kind in dict.fromkeys(row.kind for row in rows):
        kind_means = means(rows, kind=kind)
        lines.append([kind, *(f"{kind_means[name]:.2f}" for name in names)])
    lines.append(["all", *(f"{all_means[name]:.2f}" for name in names)])
    lines.append(["worst prompt", *(f"{worst(rows, name):.2f}" for name in names)])
    if single:
        lines.append(["all, against 1 row", *(f"{single[name]:.2f}" for name in names)])
    return "speed over plain decoding, geometric means", ["kind", *names], lines


def case_table(rows: Sequence[Row]) -> Table:
    """A line per row: its tokens, speeds, acceptance, and whether its tokens are the same."""
    head = ["prompt", "contender", "tokens", "tok/s", "prefill", "tau", "accepted", "host"]
    single = any("ratio_single_row" in row.measures for row in rows)
    head += ["/ plain", "rounds", *(["/ 1 row"] if single else []), "same"]
    return "prompts", head, [_line(row, single=single) for row in rows]


def cold_table(rows: Sequence[Row]) -> Table:
    """The first requests after loading."""
    head = ["contender", "load", "first token", "prefill tok/s", "tok/s"]
    lines = []
    for row in rows:
        first = {name: values[0] for name, values in row.measures.items()}
        lines.append(
            [
                row.contender,
                f"{first['load_seconds']:.2f} s",
                f"{first['first_token_seconds']:.2f} s",
                f"{first['prefill_tokens_per_second']:.0f}",
                f"{first['decode_tokens_per_second']:.1f}",
            ]
        )
    return "the first request after loading", head, lines


def _line(row: Row, *, single: bool) -> list[str]:
    middle = {name: median(values) for name, values in row.measures.items()}
    decode = row.measures["decode_seconds"]
    pairs = zip(decode, row.measures["verify_seconds"], strict=True)
    host = median(1 - verify / whole if whole else 0.0 for whole, verify in pairs)
    ratio = row.spread("ratio")
    assert ratio is not None
    return [
        row.case,
        row.contender,
        str(row.facts["tokens"]),
        f"{middle['decode_tokens_per_second']:.1f}",
        f"{middle['prefill_tokens_per_second']:.0f}",
        f"{middle['tokens_per_step']:.2f}",
        f"{100 * middle['acceptance_rate']:.0f} %",
        f"{100 * host:.1f} %",
        f"{ratio.median:.2f}",
        f"{ratio.least:.2f}-{ratio.most:.2f}",
        *([f"{middle['ratio_single_row']:.2f}"] if single else []),
        "yes" if row.facts["same_tokens"] else "NO",
    ]
