"""What a run says by kind of prompt, with the answers that are loops and without them.

A case counts as a loop when plain decoding's answer is one (`loops.py`): the drafters' answers have
the same tokens. Speeds are geometric means of the cases' medians. Tokens per step are all decoded
tokens over all steps, as Spec-Bench counts its mean accepted tokens.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from paceline.storage.report import Table
from paceline.tools.bench.ab_test import PLAIN, SINGLE_ROW
from paceline.tools.bench.record import Row
from paceline.tools.bench.summary import means, same

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
_MOST_REPEATED = 0.3


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of an answer's 8-grams that equal an earlier one of it, 0 to 1."""
    grams = [tuple(tokens[at : at + _GRAM]) for at in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_loop(tokens: Sequence[int]) -> bool:
    """True if over 30 % of an answer's 8-grams repeat an earlier one."""
    return repeated_share(tokens) > _MOST_REPEATED


def loop_cases(rows: Sequence[Row]) -> set[str]:
    """The cases whose plain answer is a loop."""
    return {row.case for row in rows if row.contender == PLAIN and is_loop(_tokens(row))}


def group_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """For a record's summary: `loop_cases`, `single_row_texts_differing`, `groups`.

    A group is a kind of prompt, or all; it has the number of its `answers` and `loops`, and by
    variant what `_COLUMNS` names, `with_loops` and `without_loops`.
    """
    circling = loop_cases(rows)
    kinds = dict.fromkeys(row.kind for row in rows)
    found = {kind: _group([row for row in rows if row.kind == kind], circling) for kind in kinds}
    return {
        "loop_cases": [
            case for case in dict.fromkeys(row.case for row in rows) if case in circling
        ],
        "single_row_texts_differing": _differing(rows),
        "groups": {**found, ALL: _group(rows, circling)},
    }


def group_tables(rows: Sequence[Row]) -> list[Table]:
    """For people: a table for each drafter; what holds without the loops is in brackets."""
    groups = group_summary(rows)["groups"]
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
    """What a table of speeds does not say, in lines."""
    found = group_summary(rows)
    answers, circling = found["groups"][ALL]["answers"], found["groups"][ALL]["loops"]
    yield f"{answers} answers, of which {circling} are loops ({100 * circling / answers:.0f} %)"
    equal = "equal" if same(rows) else "do NOT all equal"
    yield f"the drafters' tokens {equal} plain decoding's"
    if any(row.contender == SINGLE_ROW for row in rows):
        differing = found["single_row_texts_differing"]
        yield f"{SINGLE_ROW}: {differing} of {answers} answers differ from plain decoding's"


def _group(rows: Sequence[Row], circling: set[str]) -> dict[str, Any]:
    cases = dict.fromkeys(row.case for row in rows)
    straight = [row for row in rows if row.case not in circling]
    return {
        "answers": len(cases),
        "loops": sum(case in circling for case in cases),
        "with_loops": _by_contender(rows),
        "without_loops": _by_contender(straight),
    }


def _by_contender(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    ratios = {name: means(rows, name) for name in _RATIOS}
    found: dict[str, dict[str, float]] = {}
    for variant in dict.fromkeys(row.contender for row in rows):
        mine = [row for row in rows if row.contender == variant]
        steps = sum(_steps(row) for row in mine)
        found[variant] = {
            **({"tokens_per_step": sum(map(_decoded, mine)) / steps} if steps else {}),
            **{name: each[variant] for name, each in ratios.items() if variant in each},
            **({"least_ratio": min(least)} if (least := _ratios(mine)) else {}),
        }
    return found


def _line(kind: str, group: dict[str, Any], variant: str) -> list[str]:
    every, straight = (group[name].get(variant, {}) for name in ("with_loops", "without_loops"))
    count = group["answers"]
    cells = [f"{_number(every, name)} ({_number(straight, name)})" for name, _ in _COLUMNS]
    return [kind, f"{count} ({count - group['loops']})", *cells]


def _number(found: dict[str, float], name: str) -> str:
    return f"{found[name]:.2f}" if name in found else "-"


def _differing(rows: Sequence[Row]) -> int:
    return sum(row.facts.get("same_tokens") is False for row in rows if row.contender == SINGLE_ROW)


def _ratios(rows: Sequence[Row]) -> list[float]:
    return [median(row.measures["ratio"]) for row in rows if "ratio" in row.measures]


def _tokens(row: Row) -> list[int]:
    """An answer's tokens; none where a record does not have them."""
    tokens = row.facts.get("token_ids")
    if not isinstance(tokens, list) or not all(isinstance(each, int) for each in tokens):
        return []
    return tokens


def _steps(row: Row) -> int:
    """Over all rounds."""
    steps = row.counts.get("steps", 0)
    return steps if isinstance(steps, int) else 0


def _decoded(row: Row) -> int:
    """Tokens after the first, over all rounds."""
    tokens = row.facts.get("tokens")
    rounds = max(map(len, row.measures.values()), default=0)
    return max(tokens - 1, 0) * rounds if isinstance(tokens, int) else 0
