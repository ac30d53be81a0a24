"""Speeds of all contenders over the reference's plain decoding, and changed outputs.

The reference is llama-server if it took part, else paceline. Ratios are taken within a round; a
case counts with the median of its rounds. A ratio between answers with different texts compares the
speed of two texts, so changed outputs are counted. Loops are defined as in `bench run`, by
paceline's plain answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from paceline.storage.report import Table
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.record import Row
from paceline_lab.bench.summary import count_of, loop_cases, number
from paceline_lab.peers.llama_server import PROGRAM
from paceline_lab.peers.measure import AUTO, DECODE, OWN, WHOLE

_REFERENCE = f"{PROGRAM}, plain"
_KEYS = ("mean", "median", "least")


def speeds(rows: Sequence[Row]) -> dict[str, Any]:
    """Return figures by contender, for a record's summary.

    `over_reference` has the mean (geometric), median and minimum of decode speeds, the same without
    loops as `without_loops`, and the mean of whole answers; `over_own_plain` has the mean of decode
    speeds over those of the peer's first mode.
    """
    names = [*dict.fromkeys(row.contender for row in rows)]
    reference = _REFERENCE if _REFERENCE in names else PLAIN
    loops = loop_cases(rows)
    bases = {row.case: row for row in rows if row.contender == reference}
    contenders = {
        name: _figures([row for row in rows if row.contender == name], bases, loops)
        for name in names
    }
    return {"reference": reference, "loops": sorted(loops), "contenders": contenders}


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    aggregates = speeds(rows)
    reference, loops = aggregates["reference"], len(aggregates["loops"])
    title = f"decode speed over {reference} (in brackets: without {loops} answers that are loops)"
    head = ["contender", "tokens/s", "mean ratio", "median", "least", "whole answer"]
    yield title, [*head, "drafts accepted"], [*_speed_lines(aggregates["contenders"])]
    yield (
        "texts, and speed over the peer's own plain decoding",
        ["contender", "changed its text", "/ own plain"],
        [
            [
                name,
                f"{figures['texts_changed']} of {figures['answers']}",
                number(figures.get("over_own_plain")),
            ]
            for name, figures in aggregates["contenders"].items()
        ],
    )


def is_exact(rows: Sequence[Row]) -> bool:
    """Return True if paceline's own speculation changed no token; peers may change theirs."""
    return all(row.facts["same_tokens"] for row in rows if row.contender == AUTO)


def _figures(
    rows: Sequence[Row], bases: Mapping[str, Row], loops: set[str]
) -> dict[str, float | int | Mapping[str, float]]:
    rates = [median(row.measures[DECODE]) for row in rows if DECODE in row.measures]
    ratios = _ratios(rows, bases, DECODE)
    whole = _ratios(rows, bases, WHOLE)
    own = [median(row.measures[OWN]) for row in rows if OWN in row.measures]
    return {
        **({"tokens_per_second": median(rates)} if rates else {}),
        "over_reference": _spread(ratios),
        "without_loops": _spread({case: r for case, r in ratios.items() if case not in loops}),
        **({"whole_answer": geometric_mean(whole.values())} if whole else {}),
        **({"over_own_plain": geometric_mean(own)} if own else {}),
        "texts_changed": sum(not row.facts["same_tokens"] for row in rows),
        "answers": len(rows),
        **{name: sum(count_of(row, name) for row in rows) for name in ("drafted", "accepted")},
    }


def _ratios(rows: Sequence[Row], bases: Mapping[str, Row], measure: str) -> dict[str, float]:
    """Return case -> median over the rounds, for cases where both have a rate."""
    ratios = {}
    for row in rows:
        rates, base_rates = row.measures.get(measure), bases[row.case].measures.get(measure)
        if rates and base_rates:
            ratios[row.case] = median(a / b for a, b in zip(rates, base_rates, strict=True))
    return ratios


def _spread(ratios: Mapping[str, float]) -> dict[str, float]:
    values = ratios.values()
    if not values:
        return {}
    return {"mean": geometric_mean(values), "median": median(values), "least": min(values)}


def _speed_lines(contenders: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, figures in contenders.items():
        over, rest = figures["over_reference"], figures["without_loops"]
        rate, drafted = figures.get("tokens_per_second"), figures["drafted"]
        yield [
            name,
            "-" if rate is None else f"{rate:.1f}",
            *(f"{number(over.get(key))} ({number(rest.get(key))})" for key in _KEYS),
            number(figures.get("whole_answer")),
            f"{figures['accepted']} of {drafted}" if drafted else "-",
        ]
