"""Runtimes that answer questions greedily, in one or more modes, and their rows of a record.

Invariant: all peers get the same question and token limit, reuse nothing of earlier answers, and
have times measured by the runtime itself or by its client.

All peers and paceline answer the same questions, interleaved, and ratios are taken within a round.
An answer is compared with that of the peer's own first mode (`same_tokens`): by tokens if both have
them, else by text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from paceline.errors import ModelError
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline_lab.bench.ab_test import PLAIN, interleaved
from paceline_lab.bench.record import Row
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.client import Access, closed_loop, connect

DECODE, WHOLE = "decode_tokens_per_second", "answer_tokens_per_second"
"""Names in `Row.measures`: speed after the first token, and of the whole answer with its prompt."""
OWN = "ratio_own_plain"
"""Decode speed over that of the peer's first mode, in the same round."""

AUTO = "auto"
_DRAFTERS = {PLAIN: "none", AUTO: "auto"}


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    text: str
    tokens: Sequence[int] | None
    """Tokens without the stop token; None from a peer that returns text only."""
    count: int
    """Number of tokens, the stop token included."""
    first_token_seconds: float
    """Time from the request to the first token and those accepted with it."""
    decode_seconds: float
    """Time from the first token to the end."""
    seconds: float | None = None
    """Time of the whole answer, measured by a server's client; None: the sum of the two parts."""
    draft: tuple[int, int] | None = None
    """Draft tokens, and how many of them were accepted; None if the peer does not report them."""

    @property
    def whole_rate(self) -> float:
        """The throughput of the whole answer, prompt included, in answer tokens/s."""
        seconds = self.first_token_seconds + self.decode_seconds
        return self.count / (self.seconds or seconds)

    @property
    def rate(self) -> float | None:
        """The decode throughput, tokens/s after the first token; None if there are none."""
        after = self.count - 1
        return after / self.decode_seconds if after > 0 and self.decode_seconds > 0 else None

    def same(self, other: "PeerAnswer") -> bool:
        """Return True if both are equal: by tokens if both have them, else by text."""
        if self.tokens is None or other.tokens is None:
            return self.text == other.text
        return list(self.tokens) == list(other.tokens)


class Peer(Protocol):
    """A runtime with a model loaded."""

    name: str
    """Name in results."""
    settings: Mapping[str, Any]
    """Settings of the runtime, as JSON for the record."""
    modes: Sequence[str]
    """Decoding modes; the first is plain decoding, if requests can choose that."""

    def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
        """Answer greedily in one of the modes. Raises any error of the runtime."""
        ...


class ServerPeer:
    """A server that answers questions; see `Peer`."""

    def __init__(self, url: str, access: Access) -> None:
        """Connect. Raises InvalidRequest if there is no OpenAI-compatible server at the URL."""
        self._endpoints = connect(url, access)
        self.modes: Sequence[str] = tuple(self._endpoints)
        fields = {mode: endpoint.fields for mode, endpoint in self._endpoints.items()}
        endpoint = self._endpoints[self.modes[-1]]
        self.name = endpoint.name
        self.settings: Mapping[str, Any] = {"model": endpoint.model, "fields": fields}

    def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
        """Answer a question. Raises ModelError for a server error or a missing token count."""
        endpoint = replace(self._endpoints[mode], max_tokens=max_tokens)
        prompt = (question.name, question.messages)
        sample = closed_loop(endpoint, [prompt], clients=1, requests=1)[0]
        if sample.error is not None:
            raise ModelError(sample.error.partition(": ")[2])
        if sample.tokens < 1:
            raise ModelError("the answer has no token count (usage)")
        first = sample.seconds if sample.first is None else sample.first
        return PeerAnswer(sample.text, None, sample.tokens, first, sample.seconds - first)


class PacelinePeer:
    """paceline with the options of `generate`."""

    name = "paceline"
    settings: Mapping[str, Any] = {}
    modes: Sequence[str] = tuple(_DRAFTERS)

    def __init__(self, model: Model) -> None:
        """Use a model whose costs have been measured."""
        self.model = model

    def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
        options: Options = {**GREEDY, "max_tokens": max_tokens, "drafter": _DRAFTERS[mode]}
        result = self.model.without_history().generate(question.tokens, **options)
        ended = result.token_ids[-1] in self.model.files.stop_token_ids
        return PeerAnswer(
            result.text,
            result.token_ids[: -1 if ended else None],
            result.completion_tokens,
            result.stats.first_token_seconds,
            result.stats.decode_seconds,
            draft=(result.stats.drafted, result.stats.accepted),
        )


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
