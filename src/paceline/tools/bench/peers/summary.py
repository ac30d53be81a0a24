"""What the rows say together: how fast each is, whether it changed its text, and against paceline.

Everything is a geometric mean, over the questions, of medians over the rounds of ratios within a
round. A ratio over an answer with another text says how fast two texts were written: so there are
also the means over those questions only where a peer kept its own text, and where it wrote ours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from paceline.storage.report import Table
from paceline.tools.bench.ab_test import PLAIN
from paceline.tools.bench.peers.measure import OWN
from paceline.tools.bench.peers.paceline_peer import AUTO
from paceline.tools.bench.record import Row

_RATE, _FIRST = "decode_tokens_per_second", "first_token_seconds"

Means = Mapping[str, float]
"""Contender -> a mean; who has no values is not there."""


class Rows:
    """The rows of a run, by question and variant."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """Of `measure_all`."""
        self.rows = rows
        self._by_key = {row.key: row for row in rows}
        self.contenders = [*dict.fromkeys(row.contender for row in rows)]
        self.kinds = [*dict.fromkeys(row.kind for row in rows)]

    def of(self, variant: str) -> list[Row]:
        """The rows of a variant."""
        return [row for row in self.rows if row.contender == variant]

    def count(self, variant: str, fact: str) -> int:
        """In how many questions something is true of its answers."""
        return sum(bool(row.facts[fact]) for row in self.of(variant))

    def over_own_plain(self) -> Means:
        """Speed over the peer's own plain decoding."""
        return self._means(lambda row: row.measures.get(OWN), self._all)

    def auto_over(self, of: Callable[[Row], bool] = lambda _: True) -> Means:
        """Speed of paceline's auto over each, in the questions whose row is one of those."""

        def ratios(row: Row) -> list[float] | None:
            auto, other = self._auto(row).measures.get(_RATE), row.measures.get(_RATE)
            if not auto or not other:
                return None
            return [ours / theirs for ours, theirs in zip(auto, other, strict=True)]

        return self._means(ratios, of)

    def first_token(self) -> Means:
        """Seconds to the first token over those of paceline's auto."""

        def ratios(row: Row) -> list[float]:
            pairs = zip(row.measures[_FIRST], self._auto(row).measures[_FIRST], strict=True)
            return [theirs / ours for theirs, ours in pairs]

        return self._means(ratios, self._all)

    def _auto(self, row: Row) -> Row:
        return self._by_key[row.case, AUTO]

    @staticmethod
    def _all(_: Row) -> bool:
        return True

    def _means(
        self, values: Callable[[Row], Sequence[float] | None], of: Callable[[Row], bool]
    ) -> Means:
        found: dict[str, list[float]] = {}
        for row in self.rows:
            if of(row) and (each := values(row)):
                found.setdefault(row.contender, []).append(median(each))
        return {name: geometric_mean(each) for name, each in found.items()}


def kept(rows: Rows) -> bool:
    """Whether paceline's own speculation changed nothing. What peers do is found out, not held."""
    return all(row.facts["same_tokens"] for row in rows.of(AUTO))


def summary(rows: Rows) -> dict[str, Any]:
    """For JSON."""
    questions = len(rows.of(PLAIN))
    others = [name for name in rows.contenders if name != AUTO]
    return {
        "questions": questions,
        "same_tokens": kept(rows),
        "texts_changed": {
            name: questions - rows.count(name, "same_tokens") for name in rows.over_own_plain()
        },
        "texts_of_paceline": {name: rows.count(name, "same_as_paceline") for name in others},
        "over_own_plain": rows.over_own_plain(),
        "auto_over": _without_auto(rows.auto_over()),
        "auto_over_where_text_is_kept": _without_auto(rows.auto_over(_kept)),
        "auto_over_where_text_is_paceline's": _without_auto(rows.auto_over(_ours)),
        "auto_over_by_kind": {
            kind: _without_auto(rows.auto_over(_of_kind(kind))) for kind in rows.kinds
        },
        "first_token_over_auto": rows.first_token(),
    }


def tables(rows: Rows) -> Iterator[Table]:
    """For people."""
    found = summary(rows)
    questions = found["questions"]
    head = ["contender", "/ own plain", "changed its text", "auto / it", "text kept", "text ours"]
    head += ["has our text", "first token / auto's"]
    lines = []
    for name in rows.contenders:
        changed = found["texts_changed"].get(name)
        ours = found["texts_of_paceline"].get(name)
        lines.append(
            [
                name,
                _number(found["over_own_plain"].get(name)),
                "-" if changed is None else f"{changed} of {questions}",
                _number(found["auto_over"].get(name)),
                _number(found["auto_over_where_text_is_kept"].get(name)),
                _number(found["auto_over_where_text_is_paceline's"].get(name)),
                "-" if ours is None else f"{ours} of {questions}",
                _number(found["first_token_over_auto"].get(name)),
            ]
        )
    yield "decode speed, geometric means of ratios within a round", head, lines
    by_kind = found["auto_over_by_kind"]
    yield (
        "speed of paceline's auto over each, by kind of prompt",
        ["contender", *by_kind],
        [
            [name, *(_number(each.get(name)) for each in by_kind.values())]
            for name in rows.contenders
            if name != AUTO
        ],
    )


def _kept(row: Row) -> bool:
    return bool(row.facts["same_tokens"])


def _ours(row: Row) -> bool:
    return bool(row.facts["same_as_paceline"])


def _of_kind(kind: str) -> Callable[[Row], bool]:
    return lambda row: row.kind == kind


def _without_auto(means: Means) -> Means:
    return {name: mean for name, mean in means.items() if name != AUTO}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
