"""The protocol of a peer: a runtime that answers questions greedily, in one or more modes.

Invariant: all peers get the same question and token limit, reuse nothing of earlier answers, and
have times measured by the runtime itself or by its client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline_lab.bench.turns import PromptTurn


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
