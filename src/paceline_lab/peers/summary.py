"""Aggregates of the rows: speed of the contenders, changed texts, and speed of paceline over them.

Every figure is a geometric mean over questions of medians over rounds of ratios within a round. A
ratio between answers with different texts compares the speed of two texts, so there are also means
over the questions where a peer kept its own plain text, and where its text equals paceline's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from paceline.storage.report import Table
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.record import Row
from paceline_lab.peers.measure import OWN
from paceline_lab.peers.paceline_peer import AUTO
from paceline_lab.peers.speeds import DECODE, speed_table, speeds

_FIRST = "first_token_seconds"

Means = Mapping[str, float]
"""Contender -> a mean; contenders without values are left out."""


class PeerRows:
    """The rows of a run, by question and contender."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._by_key = {row.key: row for row in rows}
        self.contenders = [*dict.fromkeys(row.contender for row in rows)]
        self.kinds = [*dict.fromkeys(row.kind for row in rows)]

    def of(self, contender: str) -> list[Row]:
        """The rows of a contender."""
        return [row for row in self.rows if row.contender == contender]

    def count(self, contender: str, fact: str) -> int:
        """Number of a contender's rows in which a fact is true."""
        return sum(bool(row.facts[fact]) for row in self.of(contender))

    def over_own_plain(self) -> Means:
        """Decode speed over the peer's own plain decoding."""
        return self._means(lambda row: row.measures.get(OWN))

    def auto_over(self, of: Callable[[Row], bool] = lambda _: True) -> Means:
        """Decode speed of paceline's auto over every other contender, in rows that pass `of`."""

        def ratios(row: Row) -> list[float] | None:
            auto, other = self._auto(row).measures.get(DECODE), row.measures.get(DECODE)
            if not auto or not other:
                return None
            return [ours / theirs for ours, theirs in zip(auto, other, strict=True)]

        return self._means(ratios, lambda row: row.contender != AUTO and of(row))

    def first_token(self) -> Means:
        """Time to first token over that of paceline's auto."""

        def ratios(row: Row) -> list[float]:
            pairs = zip(row.measures[_FIRST], self._auto(row).measures[_FIRST], strict=True)
            return [theirs / ours for theirs, ours in pairs]

        return self._means(ratios)

    def _auto(self, row: Row) -> Row:
        return self._by_key[row.case, AUTO]

    def _means(
        self,
        values: Callable[[Row], Sequence[float] | None],
        of: Callable[[Row], bool] = lambda _: True,
    ) -> Means:
        medians: dict[str, list[float]] = {}
        for row in self.rows:
            if of(row) and (ratios := values(row)):
                medians.setdefault(row.contender, []).append(median(ratios))
        return {name: geometric_mean(case_medians) for name, case_medians in medians.items()}


def is_exact(rows: PeerRows) -> bool:
    """True if paceline's own speculation changed no token; peers may change theirs."""
    ours = [name for name in rows.contenders if name == AUTO or name.endswith(f", {AUTO}")]
    return all(row.facts["same_tokens"] for name in ours for row in rows.of(name))


def summary(rows: PeerRows) -> dict[str, Any]:
    """Aggregates as JSON for a record."""
    questions = len(rows.of(PLAIN))
    others = [name for name in rows.contenders if name != AUTO]
    return {
        "questions": questions,
        "same_tokens": is_exact(rows),
        "texts_changed": {
            name: questions - rows.count(name, "same_tokens") for name in rows.over_own_plain()
        },
        "texts_of_paceline": {name: rows.count(name, "same_as_paceline") for name in others},
        "over_own_plain": rows.over_own_plain(),
        "auto_over": rows.auto_over(),
        "auto_over_where_text_is_kept": rows.auto_over(lambda row: row.facts["same_tokens"]),
        "auto_over_where_text_is_paceline's": rows.auto_over(
            lambda row: row.facts["same_as_paceline"]
        ),
        "auto_over_by_kind": {kind: rows.auto_over(_of_kind(kind)) for kind in rows.kinds},
        "first_token_over_auto": rows.first_token(),
        "speeds": speeds(rows.rows),
    }


def tables(rows: PeerRows) -> Iterator[Table]:
    """The same to print."""
    yield speed_table(rows.rows)
    aggregates = summary(rows)
    questions = aggregates["questions"]
    head = ["contender", "/ own plain", "changed its text", "auto / it", "text kept", "text ours"]
    head += ["has our text", "first token / auto's"]
    lines = []
    for name in rows.contenders:
        changed = aggregates["texts_changed"].get(name)
        ours = aggregates["texts_of_paceline"].get(name)
        lines.append(
            [
                name,
                _number(aggregates["over_own_plain"].get(name)),
                "-" if changed is None else f"{changed} of {questions}",
                _number(aggregates["auto_over"].get(name)),
                _number(aggregates["auto_over_where_text_is_kept"].get(name)),
                _number(aggregates["auto_over_where_text_is_paceline's"].get(name)),
                "-" if ours is None else f"{ours} of {questions}",
                _number(aggregates["first_token_over_auto"].get(name)),
            ]
        )
    yield "decode speed, geometric means of ratios within a round", head, lines
    by_kind = aggregates["auto_over_by_kind"]
    yield (
        "speed of paceline's auto over each, by kind of prompt",
        ["contender", *by_kind],
        [
            [name, *(_number(means.get(name)) for means in by_kind.values())]
            for name in rows.contenders
            if name != AUTO
        ],
    )


def _of_kind(kind: str) -> Callable[[Row], bool]:
    return lambda row: row.kind == kind


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
