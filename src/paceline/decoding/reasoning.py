"""Separates a model's reasoning from its response, token by token.

Depends on the tags, as text or as tokens, and on one function, ids -> text; on no template and no
tokenizer. Invariants: no part of a tag is emitted; emitted text never changes; it is the same
however the tokens were grouped into blocks; no token is changed.

Reasoning precedes the response. A tag that is one token of the vocabulary is matched by its id, so
that the same letters in a text are not a tag; other tags are matched in the text. Stop strings
apply to the response alone. White space around reasoning is dropped.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from paceline.decoding.text import SIGN, Decode, StopStrings, TextStream, cut, unsigned
from paceline.decoding.types import NO_TOKEN, Piece

_RECIPIENT = re.compile(r"[\s<]")


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    tokens: Mapping[int, str]
    """Tags that are one token: id -> tag. They are not matched in the text."""
    label: str = ""
    """Text after the opening tag that is not part of the reasoning."""
    wrap: tuple[str, str] | None = None
    """Optional tags around the response after reasoning."""
    inside: bool = False
    """True if the prompt ends inside reasoning."""
    channels: bool = False
    """True if the response is a sequence of messages with named channels (harmony)."""
    calls: bool = False
    """True if messages to a function keep their tags, signed and in one order."""
    continued: tuple[int, ...] = ()
    """Tokens at the prompt's end that begin the response, which continues them."""


def answer_text(
    decode: Decode, stops: Sequence[str] = (), marks: ReasoningMarks | None = None
) -> TextStream:
    """Return the detokenizer of a response, with or without reasoning.

    Text of a continued response is not emitted again, except for any that was held back at its
    end. Raises ValueError if a stop string is empty.
    """
    if marks is None:
        return TextStream(decode, stops)
    text = ReasoningStream(decode, stops, marks)
    for token in marks.continued:
        text.push(token)
    text.reasoning_tokens = 0
    return text


class _State(Enum):
    START = auto()
    """Before the response: reasoning may begin. Read so far: white space, or part of a tag."""
    REASONING = auto()
    ANSWER = auto()
    HEADER = auto()
    """In the head of a message, which names its channel."""


class ReasoningStream(TextStream):
    def __init__(self, decode: Decode, stops: Sequence[str], marks: ReasoningMarks) -> None:
        self._decode = decode
        self._plain = TextStream(decode)
        self._stop = StopStrings(stops)
        self._marks = marks
        known = set(marks.tokens.values())
        self._opens = [mark for mark in marks.opens if mark not in known]
        self._closes = [mark for mark in marks.closes if mark not in known]
        start = _State.ANSWER if marks.channels else _State.START
        self._state = _State.REASONING if marks.inside else start
        self._held = ""  # read, possibly part of a tag
        self._space = ""  # white space at the end of the reasoning so far
        self._label = "" if marks.inside else marks.label
        self._reasoned = marks.inside
        self._begun = False  # whether this reasoning has text
        self._any = False  # whether any reasoning had text
        self._role = ""  # message head before its channel, if it names a function
        self._wrapped = False  # whether the response is inside its tags
        self._answered = False  # whether it has text after the opening tag
        self._answer: list[str] = []
        self._reasoning: list[str] = []
        self._unsure = 0  # tokens that may be part of an opening tag
        self.reasoning_tokens = 0

    def push(self, token: int) -> Piece:
        before = self._state
        mark = self._marks.tokens.get(token)
        if mark is None:
            self._read(self._plain.push(token).final)
        else:
            self._read(self._plain.finish().final)
            self._plain = TextStream(self._decode)
            self._read_mark(mark, token)
        self._count(before, self._state)
        return self._release(Piece(token))

    def finish(self, last: Piece = NO_TOKEN) -> Piece:
        self._read(self._plain.finish().final)
        self._plain = TextStream(self._decode)
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            self._append_reasoning(held)
        elif self._state is not _State.HEADER:
            before = self._reasoned and self._state is _State.START
            self._answer.append(held.lstrip() if before else held)
        return self._release(last, at_end=True)

    def _release(self, piece: Piece, *, at_end: bool = False) -> Piece:
        text, reasoning = "".join(self._answer), "".join(self._reasoning)
        self._answer.clear()
        self._reasoning.clear()
        final = self._stop.push(text, at_end=at_end)
        return piece.extended(unsigned(text), final, unsigned(reasoning))

    def _count(self, before: _State, after: _State) -> None:
        if _State.REASONING in (before, after):
            self.reasoning_tokens += 1 + self._unsure
            self._unsure = 0
        elif after in (_State.START, _State.HEADER):
            self._unsure += 1
        else:
            self._unsure = 0

    def _read(self, text: str) -> None:
        while text and self._state in (_State.START, _State.REASONING):
            read = self._read_start if self._state is _State.START else self._read_reasoning
            text = read(text)
        if self._state is _State.HEADER:
            self._held += text
        elif text:
            self._read_answer(text)

    def _read_start(self, text: str) -> str:
        self._held += text
        text = self._held.lstrip()
        wraps = [self._marks.wrap[0]] if self._marks.wrap and self._reasoned else []
        for mark in (*self._opens, *wraps):
            if text.startswith(mark):
                self._held = ""
                if mark in wraps:
                    self._state, self._wrapped = _State.ANSWER, True
                    return text[len(mark) :]
                self._begin_reasoning()
                return text[len(mark) :]
        if not text or any(mark.startswith(text) for mark in (*self._opens, *wraps)):
            return ""
        rest = text if self._reasoned else self._held
        self._held, self._state = "", _State.ANSWER
        return rest

    def _read_reasoning(self, text: str) -> str:
        self._held += text
        if self._label:
            if self._label.startswith(self._held) and self._held != self._label:
                return ""
            self._held = self._held.removeprefix(self._label)
            self._label = ""
        text, mark, rest = cut(self._held, self._closes)
        self._append_reasoning(text)
        if mark is None:
            self._held = rest
            return ""
        self._held = ""
        self._end_reasoning()
        return rest

    def _read_answer(self, text: str) -> None:
        if self._wrapped and self._marks.wrap:
            self._held += text
            if not self._answered:
                self._held = self._held.lstrip()
                self._answered = bool(self._held)
            before, close, rest = cut(self._held, self._marks.wrap[1:])
            text = before.rstrip()
            if close is None:
                self._held = self._held[len(text) :]
            else:
                text, self._held, self._wrapped = text + rest, "", False
        self._answer.append(text)

    def _read_mark(self, mark: str, token: int) -> None:
        """Handle a tag that is a token."""
        if self._marks.channels:
            self._read_channel_mark(mark)
        elif self._state is _State.START and mark in self._marks.opens:
            self._held = ""
            self._begin_reasoning()
        elif self._state is _State.REASONING and mark in self._marks.closes:
            held, self._held = self._held, ""
            self._append_reasoning(held)
            self._end_reasoning()
        elif not (self._state is _State.REASONING and not self._begun):
            # A tag elsewhere is text, unless it repeats the tag at the end of the prompt.
            self._read(self._decode([token]))

    def _read_channel_mark(self, mark: str) -> None:
        """Handle a harmony tag: <|start|>role<|channel|>name<|message|>text<|end|>."""
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            self._append_reasoning(held)
        if mark == "<|message|>":
            head = self._role + held
            call = " to=" in head
            if held.split()[:1] == ["analysis"] and not call:
                self._begin_reasoning()
            else:
                self._state = _State.ANSWER
                if call:  # only the head names the function
                    self._answer.append(self._call_head(head))
        else:
            from_head = self._state is _State.HEADER and " to=" in held
            self._role = f"{held} " if mark == "<|channel|>" and from_head else ""
            self._state = _State.ANSWER if mark == "<|end|>" else _State.HEADER

    def _call_head(self, head: str) -> str:
        """Return the head of a message to a function, named after the role or the channel."""
        if not self._marks.calls:
            return head
        _, _, recipient = head.partition(" to=")
        return f"{SIGN}<|channel|>commentary to={_RECIPIENT.split(recipient)[0]}<|message|>"

    def _begin_reasoning(self) -> None:
        self._state, self._label = _State.REASONING, self._marks.label
        self._space = "\n\n" if self._any else ""
        self._begun, self._reasoned = False, True

    def _end_reasoning(self) -> None:
        self._state, self._space = _State.START, ""

    def _append_reasoning(self, text: str) -> None:
        """Append reasoning, without the white space around it."""
        if not self._begun:
            text = text.lstrip()
            if not text:
                return
            self._begun = self._any = True
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]
        self._reasoning.append(text[:end])
