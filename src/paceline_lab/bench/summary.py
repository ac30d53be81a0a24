"""Aggregates and tables of rows: speed by kind of prompt, with loops and without.

A loop is an answer that repeats itself: drafters are fast on it, but it is useless. An answer of n
tokens has n - 7 8-grams, one per position where eight tokens begin. Its repeated share is the share
of these that equal an earlier 8-gram of the same answer; over 0.3 it is a loop. An answer of fewer
than eight tokens has a share of 0. The prompt does not count: quoting it does not make a loop.

A case is a loop if plain decoding's answer is one; the drafters' answers have the same tokens.
Speeds are geometric means of the cases' medians. Tokens per step are all decoded tokens over all
steps, as Spec-Bench counts its mean accepted tokens.
"""

from collections.abc import Iterator, Sequence
from statistics import geometric_mean, median
from typing import Any

from paceline.storage.report import Table
from paceline_lab.bench.ab_test import PLAIN, SINGLE_ROW
from paceline_lab.bench.record import Row

ALL = "all"

_RATIOS = ("ratio", "ratio_single_row", "ratio_with_prefill")
_COLUMNS = (
    ("tokens_per_step", "tokens per step"),
    ("ratio", "/ plain"),
    ("least_ratio", "least"),
    ("ratio_with_prefill", "with prefill"),
    ("ratio_single_row", "/ 1 row"),
)
_GRAM = 8
_MAX_REPEATED = 0.3


def repeated_share(tokens: Sequence[int] | Sequence[str]) -> float:
    """Return the share of an answer's 8-grams that equal an earlier one, 0 to 1."""
    grams = [tuple(tokens[at : at + _GRAM]) for at in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_loop(tokens: Sequence[int] | Sequence[str]) -> bool:
    """Return True if over 30 % of an answer's 8-grams equal an earlier one."""
    return repeated_share(tokens) > _MAX_REPEATED


def loop_cases(rows: Sequence[Row]) -> set[str]:
    """Return the cases where plain decoding's answer is a loop."""
    plain = (row for row in rows if row.contender == PLAIN)
    return {row.case for row in plain if is_loop(row.facts.get("token_ids", []))}


def all_same_tokens(rows: Sequence[Row]) -> bool:
    """Return True if all tokens equal plain decoding's, except the single-row baseline's."""
    exact = (row for row in rows if row.contender != SINGLE_ROW)
    return all(row.facts.get("same_tokens", True) for row in exact)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a record's aggregates: exactness, speeds over plain decoding, loops, and `groups`.

    A group is a kind of prompt, or `all`. It has the numbers of its `answers` and `loops`, and the
    figures of `_COLUMNS` by contender, `with_loops` and `without_loops`.
    """
    cases = dict.fromkeys(row.case for row in rows)
    looping = loop_cases(rows)
    kinds = dict.fromkeys(row.kind for row in rows)
    groups = {kind: _group([row for row in rows if row.kind == kind], looping) for kind in kinds}
    return {
        "same_tokens": all_same_tokens(rows),
        "geometric_means": _means(rows, "ratio"),
        "loop_cases": [case for case in cases if case in looping],
        "single_row_texts_differing": sum(
            row.contender == SINGLE_ROW and row.facts.get("same_tokens") is False for row in rows
        ),
        "groups": {**groups, ALL: _group(rows, looping)},
    }


def group_tables(rows: Sequence[Row]) -> list[Table]:
    """Return one table per drafter; values without the loops are in brackets."""
    groups = summary(rows)["groups"]
    names = [name for name in dict.fromkeys(row.contender for row in rows) if name != PLAIN]
    head = ["kind", "answers", *(title for _, title in _COLUMNS)]
    return [
        (
            f"{name}, by kind (in brackets: without the answers that are loops)",
            head,
            [_line(kind, group, name) for kind, group in groups.items()],
        )
        for name in names
    ]


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines about loops and exactness, which a table of speeds does not show."""
    aggregates = summary(rows)
    answers, loops = aggregates["groups"][ALL]["answers"], aggregates["groups"][ALL]["loops"]
    yield f"{answers} answers, {loops} of them loops ({100 * loops / answers:.0f} %)"
    equal = "equal" if all_same_tokens(rows) else "do NOT all equal"
    yield f"the drafters' tokens {equal} plain decoding's"
    if any(row.contender == SINGLE_ROW for row in rows):
        differing = aggregates["single_row_texts_differing"]
        yield f"{SINGLE_ROW}: {differing} of {answers} answers differ from plain decoding's"
        yield from verdicts(rows)


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each drafter's speed over the faster of plain decoding and its single rows."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.contender not in (PLAIN, SINGLE_ROW) and "ratio_single_row" in row.measures:
            pairs = zip(row.measures["ratio"], row.measures["ratio_single_row"], strict=True)
            ratios.setdefault(row.contender, []).append(median(map(min, pairs)))
    for name, values in ratios.items():
        yield f"{name}: {geometric_mean(values):.2f}x the speed of the faster plain decoding"


def case_table(rows: Sequence[Row]) -> Table:
    """Return a line per row: tokens, speeds, acceptance, and whether the tokens are the same."""
    head = ["prompt", "contender", "tokens", "tok/s", "prefill tok/s", "seconds", "tau", "accepted"]
    single = any("ratio_single_row" in row.measures for row in rows)
    head += ["host", "/ plain", "rounds", *(["/ 1 row"] if single else []), "same"]
    return "prompts", head, [_case_line(row, single=single) for row in rows]


def _means(rows: Sequence[Row], measure: str) -> dict[str, float]:
    """Return contender -> geometric mean of the medians of rows that have the measure."""
    medians: dict[str, list[float]] = {}
    for row in rows:
        if measure in row.measures:
            medians.setdefault(row.contender, []).append(median(row.measures[measure]))
    return {name: geometric_mean(values) for name, values in medians.items()}


def _group(rows: Sequence[Row], looping: set[str]) -> dict[str, Any]:
    cases = dict.fromkeys(row.case for row in rows)
    return {
        "answers": len(cases),
        "loops": sum(case in looping for case in cases),
        "with_loops": _by_contender(rows),
        "without_loops": _by_contender([row for row in rows if row.case not in looping]),
    }


def _by_contender(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    ratios = {name: _means(rows, name) for name in _RATIOS}
    by_contender: dict[str, dict[str, float]] = {}
    for contender in dict.fromkeys(row.contender for row in rows):
        contender_rows = [row for row in rows if row.contender == contender]
        steps = sum(count_of(row, "steps") for row in contender_rows)
        medians = [
            median(row.measures["ratio"]) for row in contender_rows if "ratio" in row.measures
        ]
        by_contender[contender] = {
            **({"tokens_per_step": sum(map(_decoded, contender_rows)) / steps} if steps else {}),
            **{name: values[contender] for name, values in ratios.items() if contender in values},
            **({"least_ratio": min(medians)} if medians else {}),
        }
    return by_contender


def _line(kind: str, group: dict[str, Any], contender: str) -> list[str]:
    with_loops, without_loops = (
        group[name].get(contender, {}) for name in ("with_loops", "without_loops")
    )
    count = group["answers"]
    names = [name for name, _ in _COLUMNS]
    cells = [f"{number(with_loops.get(n))} ({number(without_loops.get(n))})" for n in names]
    return [kind, f"{count} ({count - group['loops']})", *cells]


def _case_line(row: Row, *, single: bool) -> list[str]:
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
        f"{middle['prefill_seconds'] + middle['decode_seconds']:.2f}",
        f"{middle['tokens_per_step']:.2f}",
        f"{100 * middle['acceptance_rate']:.0f} %",
        f"{100 * host:.1f} %",
        f"{ratio.median:.2f}",
        f"{ratio.min_value:.2f}-{ratio.max_value:.2f}",
        *([f"{middle['ratio_single_row']:.2f}"] if single else []),
        "yes" if row.facts["same_tokens"] else "NO",
    ]


def count_of(row: Row, name: str) -> int:
    """Return a sum over the rounds; 0 if it was not counted."""
    count = row.counts.get(name, 0)
    return count if isinstance(count, int) else 0


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _decoded(row: Row) -> int:
    """Return the number of tokens after the first, in all rounds."""
    rounds = max(map(len, row.measures.values()), default=0)
    return max(int(row.facts.get("tokens", 0)) - 1, 0) * rounds
