"""The questions answered by all, in turns, as rows of a record.

A ratio is taken within a round. What is compared of the answers: with the variant's own first way
(`same_tokens`), and with paceline's (`same_as_paceline`); by tokens where both have them.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from paceline.errors import ModelError
from paceline.models import Progress
from paceline.tools.bench.ab_test import PLAIN, interleaved
from paceline.tools.bench.journal import Journal
from paceline.tools.bench.peers.base import Answer, Peer, Question
from paceline.tools.bench.peers.paceline_peer import Ours
from paceline.tools.bench.peers.registry import reason
from paceline.tools.bench.record import Row

OWN = "ratio_own_plain"
"""Of `Row.measures`: decode speed over that of the peer's own first way, in the same round."""


class Variant(NamedTuple):
    """A peer answering in one way."""

    name: str
    own: str
    """The name of the peer's first way: its own plain decoding."""
    peer: Peer
    way: str

    def answer(self, question: Question, max_tokens: int) -> Answer:
        """The answer.

        Raises:
            ModelError: the peer cannot answer.
        """
        try:
            return self.peer.answer(question, max_tokens, self.way)
        except Exception as error:  # of any kind: every runtime has its own
            if isinstance(self.peer, Ours):
                raise
            raise ModelError(f"{self.name} fails at {question.id}: {reason(error)}") from error


def variants_of(ours: Ours, peers: Sequence[Peer]) -> list[Variant]:
    """The ways of paceline, then each peer's."""
    found = [Variant(way, PLAIN, ours, way) for way in ours.ways]
    for peer in peers:
        own = f"{peer.name}, {peer.ways[0]}"
        found += [Variant(f"{peer.name}, {way}", own, peer, way) for way in peer.ways]
    return found


def measure_all(
    questions: Sequence[Question],
    variants: Sequence[Variant],
    *,
    rounds: int,
    max_tokens: int,
    kept: Journal,
    progress: Progress,
) -> list[Row]:
    """The rows of all questions; what an interrupted run has kept is not measured again."""
    rows: list[Row] = []
    for number, question in enumerate(questions, start=1):
        known = kept.get(question.id)
        if known is None:
            fresh = measure(question, variants, rounds=rounds, max_tokens=max_tokens, start=number)
            known, note = kept.add(question.id, fresh), ""
        else:
            note = " (measured before)"
        rows += known
        ratios = [
            f"{row.contender} {median(row.measures['ratio']):.2f}"
            for row in known[1:]
            if "ratio" in row.measures
        ]
        progress.say(f"{number}/{len(questions)} {question.id}: {'; '.join(ratios)}{note}")
    return rows


def measure(
    question: Question,
    variants: Sequence[Variant],
    *,
    rounds: int,
    max_tokens: int,
    start: int = 0,
) -> list[Row]:
    """Let all answer a question, in turns; a row for each.

    Args:
        question: what is asked.
        variants: the first is paceline's plain decoding.
        rounds: how often each answers.
        max_tokens: of each answer.
        start: who begins; pass another number for each question.

    Raises:
        ModelError: one of them cannot answer.
    """

    def answering(variant: Variant) -> Callable[[], Answer]:
        return lambda: variant.answer(question, max_tokens)

    ways = {each.name: answering(each) for each in variants}
    answers = interleaved(ways, rounds, start)
    return [_row(question, each, answers, variants[0].name) for each in variants]


def _row(
    question: Question,
    variant: Variant,
    answers: Mapping[str, Sequence[Answer]],
    plain: str,
) -> Row:
    mine = answers[variant.name]
    own, ours = answers[variant.own][0], answers[plain][0]
    rates = [each.rate for each in mine]
    measures: dict[str, Sequence[float | None]] = {
        "decode_tokens_per_second": rates,
        "first_token_seconds": [each.first_token_seconds for each in mine],
        "decode_seconds": [each.decode_seconds for each in mine],
        "ratio": _ratios(rates, answers[plain]),
    }
    if variant.name != variant.own:
        measures[OWN] = _ratios(rates, answers[variant.own])
    return Row(
        question.id,
        question.kind,
        variant.name,
        {name: found for name, each in measures.items() if (found := _whole(each))},
        facts={
            "peer": variant.peer.name,
            "tokens": mine[0].count,
            "prompt_tokens": len(question.tokens),
            "same_tokens": all(each.same(own) for each in mine),
            "same_as_paceline": all(each.same(ours) for each in mine),
        },
    )


def _ratios(rates: Sequence[float | None], others: Sequence[Answer]) -> list[float | None]:
    """Over the others' rates, round by round; None where one of the two has none."""
    pairs = zip(rates, [each.rate for each in others], strict=True)
    return [mine / other if mine and other else None for mine, other in pairs]


def _whole(values: Sequence[float | None]) -> list[float]:
    """The values, or nothing where one is missing: rounds have to stay at their places."""
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else []
