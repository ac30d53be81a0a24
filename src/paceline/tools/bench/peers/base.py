"""What the rest of this room knows of a runtime: it answers a question greedily, in some ways.

The rule: everybody gets the same question with the same limit, answers it as a first request has it
(nothing of an earlier answer is reused), and its times are its own or its client's, never guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.errors import ModelError


class NotComparable(ModelError):
    """A runtime that cannot answer this model, or not here; the message says why."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, in both forms: a peer that takes token ids gets these."""

    id: str
    kind: str
    messages: Sequence[dict[str, Any]]
    tokens: Sequence[int]
    """The messages as the model's chat template has them, encoded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and how long it took."""

    text: str
    tokens: Sequence[int] | None
    """Without the token that ended it; None where only text comes back."""
    count: int
    """Tokens, with the one that ended it."""
    first_token_seconds: float
    """From the request to the first token, with what came with it."""
    decode_seconds: float
    """From then to the end."""
    at_first: int = 1
    """Tokens that came with the first: more than 1 where drafts are verified with the prompt."""

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first; None of an answer that has none."""
        after = self.count - self.at_first
        return after / self.decode_seconds if after > 0 and self.decode_seconds > 0 else None

    def same(self, other: "Answer") -> bool:
        """Whether both say the same: by tokens where both have them, else by text."""
        if self.tokens is None or other.tokens is None:
            return self.text == other.text
        return list(self.tokens) == list(other.tokens)


class Peer(Protocol):
    """A runtime, opened and set up in one way."""

    @property
    def name(self) -> str:
        """What it is called in results."""
        ...

    @property
    def packages(self) -> Sequence[str]:
        """The packages whose versions a result names."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What was set, and what it says of itself: for the record, as JSON."""
        ...

    @property
    def ways(self) -> Sequence[str]:
        """How it can answer; the first is its own plain decoding, where a request can choose it."""
        ...

    def answer(self, question: Question, max_tokens: int, way: str) -> Answer:
        """Answer greedily, in one of the ways. Raises whatever the runtime raises."""
        ...
