"""An answer as a client gets it: text, and the tokens and logprobs that are part of that text.

Knows what the scheduler tells of one request. Knows nothing of HTTP. The rules: what was told is
never taken back; a token is told with or after its text; and tokens that the text ends before are
not told at all: those of a stop string, and the one that ended the answer.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import NamedTuple

from paceline.decoding.logprobs import TokenLogprob
from paceline.decoding.text import Decode, TextStream
from paceline.decoding.types import FinishReason
from paceline.runtime.result import Result
from paceline.server.request import Progress


class Piece(NamedTuple):
    """A token of an answer, and the text that became whole with it.

    A token of a thought has no text of the answer; what it thinks is in `reasoning`.
    """

    token: int
    text: str
    start: int
    """Where in the answer the text begins, in characters."""
    likely: TokenLogprob | None = None
    source: str | None = None
    """Who named it before the model picked it: a drafter, or `forced`; None: nobody."""
    reasoning: str = ""
    """The text of a thought that became whole with it."""

    @property
    def end(self) -> int:
        """Where its text ends."""
        return self.start + len(self.text)


class Part(NamedTuple):
    """What is new of an answer."""

    text: str
    pieces: list[Piece]
    reasoning: str = ""


class StepCount(NamedTuple):
    """One step of the engine, after the prompt."""

    drafted: int
    accepted: int


@dataclass(slots=True)
class Answer:
    """One answer, as it comes."""

    ends: Collection[int]
    """Tokens that end it."""
    silent: bool = False
    """Whether nothing of it is told: only its prompt was to be read."""
    text: str = ""
    reasoning: str = ""
    """The model's thoughts, where they are told apart."""
    pieces: list[Piece] = field(default_factory=list)
    steps: list[StepCount] = field(default_factory=list)
    result: Result | None = None
    """When it has ended."""
    asked: float = field(default_factory=perf_counter)
    """When it was asked for."""
    _held: deque[Piece] = field(default_factory=deque)
    _decoded: int = 0
    _reasoning_tokens: int = 0
    _begun: bool = False
    _stopped: bool = False

    @property
    def done(self) -> Result:
        """The result. Only when it has ended."""
        assert self.result is not None
        return self.result

    @property
    def tokens(self) -> int:
        """How many tokens were told."""
        return len(self.pieces)

    @property
    def reasoning_tokens(self) -> int:
        """How many of these are thoughts."""
        return min(self._reasoning_tokens, self.tokens)

    @property
    def speculation(self) -> dict[str, int]:
        """Steps after the prompt so far, and what was guessed in them."""
        return {
            "steps": len(self.steps),
            "drafted": sum(step.drafted for step in self.steps),
            "accepted": sum(step.accepted for step in self.steps),
        }

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended. Only when it has."""
        return FinishReason.LENGTH if self.silent else self.done.finish_reason

    def progress(self, event: Progress) -> Part:
        """More of it."""
        step = event.step
        if self._begun:
            self.steps.append(StepCount(step.drafted, step.accepted))
        self._begun = True
        if self.silent:
            return Part("", [])
        self._reasoning_tokens = step.reasoning_tokens
        found = enumerate(zip_longest(step.tokens, step.pieces, event.logprobs))
        for place, (token, piece, likely) in found:
            if token in self.ends:
                self._stopped = True
                self._extend(piece.text, piece.reasoning)
                break
            source = step.source if place < step.stood else None
            new = Piece(token, piece.text, self._decoded, likely, source, piece.reasoning)
            self._held.append(new)
            self._decoded += len(piece.text)
        certain = self._certain(len(self.text) + len(step.text))
        return self._tell(step.text, certain, step.reasoning)

    def finish(self, result: Result) -> Part:
        """Its end."""
        self.result = result
        if self.silent:
            return Part("", [])
        length = len(result.text)
        self._extend(result.text[self._decoded :], "")  # held back until the end
        cut = result.finish_reason == FinishReason.STOP and not self._stopped
        pieces = []
        while self._held and not (cut and self._held[0].start >= length):
            piece = self._held.popleft()
            pieces.append(piece._replace(text=piece.text[: max(length - piece.start, 0)]))
        self._held.clear()
        reasoning = result.reasoning[len(self.reasoning) :]
        return self._tell(result.text[len(self.text) :], pieces, reasoning)

    def _extend(self, text: str, reasoning: str) -> None:
        """Add text that is no token's own to the last token that has not been sent."""
        if self._held:
            last = self._held.pop()
            self._held.append(
                last._replace(text=last.text + text, reasoning=last.reasoning + reasoning)
            )
            self._decoded += len(text)

    def _certain(self, told: int) -> list[Piece]:
        """The tokens whose text was told, up to the last that has any."""
        certain = 0
        for place, piece in enumerate(self._held, 1):
            if piece.end > told:
                break
            if piece.text or piece.reasoning:
                certain = place
        return [self._held.popleft() for _ in range(certain)]

    def _tell(self, text: str, pieces: list[Piece], reasoning: str) -> Part:
        self.text += text
        self.reasoning += reasoning
        self.pieces += pieces
        return Part(text, pieces, reasoning)


def pieces_of(decode: Decode, tokens: list[int]) -> list[Piece]:
    """Tokens that are known, with the text of each."""
    stream = TextStream(decode)
    found: list[Piece] = []
    at = 0
    for place, token in enumerate(tokens):
        text = stream.push(token).text
        if place == len(tokens) - 1:
            text += stream.finish().text
        found.append(Piece(token, text, at))
        at += len(text)
    return found
