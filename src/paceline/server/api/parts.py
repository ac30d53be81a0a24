"""An answer as parts: thoughts, text and calls, in the order in which they are sent.

Independent of an API's names: `/v1/responses` makes items of the parts, `/v1/messages` content
blocks. Invariants: one part is open at a time, the last one; and the texts of a part's deltas,
joined, are its text.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from paceline.server.api.chat import Chat, call_id
from paceline.server.body import Message
from paceline.server.stream_text import Answer, Delta, Piece
from paceline.server.tools import called
from paceline.tools.calls import CallPiece, CallStream


class PartKind(StrEnum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    kind: PartKind
    index: int
    """Its place among the parts."""
    name: str = ""
    """The called function."""
    text: str = ""
    """Thoughts, text, or the arguments of a call: a JSON object."""
    pieces: list[Piece] = field(default_factory=list)
    """The tokens of a text."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    call_id: str = ""
    """The id of a call, as the model's chat template demands."""
    whole: bool = False
    """Whether a call is complete: the limit of tokens may cut one."""


class Change(Enum):
    OPEN = "open"
    GROW = "grow"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class PartEvent:
    change: Change
    part: Part
    text: str = ""
    """What is new."""
    pieces: tuple[Piece, ...] = ()
    """The tokens of new text."""


class PartStream:
    """Divides an answer into parts as it grows."""

    def __init__(self, chat: Chat, *, reasoning: bool = True) -> None:
        """Start with no part of the chat's first answer; without `reasoning` there are no thoughts.

        A stream may have an incomplete call; in a whole answer such a call is text.
        """
        self._reasoning = reasoning
        self._form = chat.tool_form
        self.parts: list[Part] = []
        self._calls = None
        if self._form is not None:
            self._calls = CallStream(
                self._form, chat.functions, whole=not chat.streamed, forced=chat.forced
            )
        self._open = False
        self._pieces: list[Piece] = []

    def push(self, delta: Delta) -> list[PartEvent]:
        """The changes that a delta makes. The last delta closes the last part."""
        return list(self._changes(delta))

    def whole(self, answer: Answer) -> list[Part]:
        """The parts of a complete answer, of which nothing was pushed."""
        delta = Delta(0, answer.text, answer.pieces, answer.reasoning, answer.signed, finished=True)
        self.push(delta)
        return self.parts

    def _changes(self, delta: Delta) -> Iterator[PartEvent]:
        if delta.reasoning and self._reasoning:
            yield from self._grow(PartKind.REASONING, delta.reasoning)
        thought = bool(self.parts) and self.parts[-1].kind is PartKind.REASONING
        # Tokens of thoughts, and of the marks after them, are no tokens of the text.
        self._pieces += [piece for piece in delta.pieces if piece.text or not thought]
        if self._calls is None:
            split: list[str | CallPiece] = [delta.text]
        else:
            split = self._calls.push(delta.signed)
            split += self._calls.finish() if delta.finished else []
        for piece in split:
            if isinstance(piece, CallPiece):
                yield from self._call(piece)
            elif piece:
                yield from self._grow(PartKind.TEXT, piece)
        if delta.finished:
            if not self.parts:
                yield from self._start(PartKind.TEXT)
            yield from self._close()

    def _call(self, piece: CallPiece) -> Iterator[PartEvent]:
        self._pieces = []
        if piece.name:
            yield from self._start(PartKind.CALL, piece.name)
        if piece.arguments:
            yield from self._grow(PartKind.CALL, piece.arguments)
        self.parts[-1].whole = piece.last

    def _grow(self, kind: PartKind, text: str) -> Iterator[PartEvent]:
        if not (self._open and self.parts[-1].kind is kind):
            yield from self._start(kind)
        part, pieces = self.parts[-1], tuple[Piece, ...]()
        part.text += text
        if kind is PartKind.TEXT:
            pieces, self._pieces = tuple(self._pieces), []
            part.pieces += pieces
        yield PartEvent(Change.GROW, part, text, pieces)

    def _start(self, kind: PartKind, name: str = "") -> Iterator[PartEvent]:
        yield from self._close()
        called = call_id(self._form) if name else ""
        self.parts.append(Part(kind, len(self.parts), name, call_id=called))
        self._open = True
        yield PartEvent(Change.OPEN, self.parts[-1])

    def _close(self) -> Iterator[PartEvent]:
        if self._open:
            self._open = False
            yield PartEvent(Change.CLOSE, self.parts[-1])


def as_message(parts: list[Part]) -> Message:
    """The parts of an answer as the message of a chat, without an incomplete call."""

    def text(kind: PartKind) -> str:
        return "".join(part.text for part in parts if part.kind is kind)

    calls = [called(part.call_id, part.name, part.text) for part in parts if part.whole]
    return Message(
        role="assistant",
        content=text(PartKind.TEXT),
        reasoning_content=text(PartKind.REASONING) or None,
        tool_calls=calls or None,
    )
