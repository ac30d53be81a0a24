"""Rows of a record: all peers and paceline on the same questions, interleaved.

Ratios are taken within a round. An answer is compared with that of the peer's own first mode
(`same_tokens`): by tokens if both have them, else by text.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from paceline.errors import ModelError
from paceline_lab.bench.ab_test import PLAIN, interleaved
from paceline_lab.bench.record import Row
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.peers.base import Peer, PeerAnswer
from paceline_lab.peers.paceline_peer import PacelinePeer

DECODE, WHOLE = "decode_tokens_per_second", "answer_tokens_per_second"
"""Names in `Row.measures`: speed after the first token, and of the whole answer with its prompt."""
OWN = "ratio_own_plain"
"""Decode speed over that of the peer's first mode, in the same round."""


class PeerContender(NamedTuple):
    name: str
    own: str
    """Name of the contender for the peer's first mode, its plain decoding."""
    peer: Peer
    mode: str

    def answer(self, question: PromptTurn, max_tokens: int) -> PeerAnswer:
        """Answer a question. Raises ModelError if the peer fails."""
        try:
            return self.peer.answer(question, max_tokens, self.mode)
        except Exception as error:  # every runtime has its own types
            if isinstance(self.peer, PacelinePeer):
                raise
            raise ModelError(
                f"{self.name} fails at {question.name}: {' '.join(str(error).split())}"
            ) from error


def contenders_of(ours: PacelinePeer, peers: Sequence[Peer]) -> list[PeerContender]:
    """Return the contenders of paceline, then of the peers: one per mode."""
    contenders = [PeerContender(mode, PLAIN, ours, mode) for mode in ours.modes]
    for peer in peers:
        plain_name = f"{peer.name}, {peer.modes[0]}"
        contenders += [
            PeerContender(f"{peer.name}, {mode}", plain_name, peer, mode) for mode in peer.modes
        ]
    return contenders


def measure(
    question: PromptTurn,
    contenders: Sequence[PeerContender],
    *,
    rounds: int,
    max_tokens: int,
    start: int = 0,
) -> list[Row]:
    """Answer a question with all contenders, interleaved; return one row per contender.

    The first contender is paceline's plain decoding; `start` is as for `interleaved`. Raises
    ModelError if a peer fails.
    """
    calls = {
        contender.name: partial(contender.answer, question, max_tokens) for contender in contenders
    }
    answers = interleaved(calls, rounds, start)
    return [_row(question, contender, answers, contenders[0].name) for contender in contenders]


def _row(
    question: PromptTurn,
    contender: PeerContender,
    answers: Mapping[str, Sequence[PeerAnswer]],
    plain: str,
) -> Row:
    own = answers[contender.name]
    peer_plain = answers[contender.own][0]
    rates = [answer.rate for answer in own]

    def over(base: str) -> list[float | None]:
        """Return the ratios of decode speed, by round."""
        pairs = zip(rates, [answer.rate for answer in answers[base]], strict=True)
        return [rate / base_rate if rate and base_rate else None for rate, base_rate in pairs]

    measures: dict[str, Sequence[float | None]] = {
        DECODE: rates,
        WHOLE: [answer.whole_rate for answer in own],
        "first_token_seconds": [answer.first_token_seconds for answer in own],
        "decode_seconds": [answer.decode_seconds for answer in own],
        "ratio": over(plain),
        **({OWN: over(contender.own)} if contender.name != contender.own else {}),
    }
    drafts = [answer.draft for answer in own if answer.draft is not None]
    counts = {"drafted": sum(n for n, _ in drafts), "accepted": sum(n for _, n in drafts)}
    return Row(
        question.name,
        question.prompt.kind,
        contender.name,
        # A measure has a value for each round, or is omitted.
        {
            name: complete
            for name, values in measures.items()
            if len(complete := [value for value in values if value is not None]) == len(values)
        },
        counts=counts if len(drafts) == len(own) else {},
        facts={
            "peer": contender.peer.name,
            "tokens": own[0].count,
            "prompt_tokens": len(question.tokens),
            "same_tokens": all(answer.same(peer_plain) for answer in own),
            **({"token_ids": [*(peer_plain.tokens or [])]} if contender.name == plain else {}),
        },
    )
