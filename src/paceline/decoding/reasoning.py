"""Tells a model's thoughts apart from its answer, token by token.

Knows the marks around thoughts, as text or as tokens, and one function, ids -> text. Knows neither
templates nor tokenizers. The rules: a mark is never shown in part; nothing is taken back; what is
shown is the same however the tokens were grouped into blocks; and no token is changed.

A thought comes before the answer. A mark that is one token of the vocabulary is known by its id, so
the same letters in a text are no mark; others are looked for in the text. Stop strings are for the
answer: a thought may have them. White space around a thought is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from paceline.decoding.text import Decode, StopStrings, TextPiece, TextStream, overlap


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How one answer's thoughts are marked."""

    opens: tuple[str, ...]
    """Marks that begin a thought."""
    closes: tuple[str, ...]
    """Marks that end it."""
    tokens: Mapping[int, str]
    """Marks that are one token: id -> mark. They are not looked for in the text."""
    label: str = ""
    """What follows the opening mark and is no part of the thought."""
    wrap: tuple[str, str] | None = None
    """What may be around the answer after a thought."""
    inside: bool = False
    """Whether the prompt ends in a thought."""
    channels: bool = False
    """Whether the answer comes in messages, each with the name of its channel (harmony)."""


def answer_text(
    decode: Decode, stops: Sequence[str] = (), thoughts: ReasoningMarks | None = None
) -> TextStream:
    """What makes text of an answer's tokens.

    Raises:
        ValueError: a stop string is empty.
    """
    if thoughts is None:
        return TextStream(decode, stops)
    return ReasoningText(decode, stops, thoughts)


class _Place(Enum):
    START = auto()
    """Before the answer: a thought may begin. What was read is white space, or half a mark."""
    THOUGHT = auto()
    ANSWER = auto()
    HEADER = auto()
    """In the head of a message, of which the channel's name is a part."""


class ReasoningText(TextStream):
    """A `TextStream` that divides the text into reasoning and answer."""

    def __init__(self, decode: Decode, stops: Sequence[str], thoughts: ReasoningMarks) -> None:
        """Prepare for one answer.

        Raises:
            ValueError: a stop string is empty.
        """
        self._ids_to_text = decode
        self._plain = TextStream(decode)
        self._stops = StopStrings(stops)
        self._marks = thoughts
        known = set(thoughts.tokens.values())
        self._opens = [mark for mark in thoughts.opens if mark not in known]
        self._closes = [mark for mark in thoughts.closes if mark not in known]
        start = _Place.ANSWER if thoughts.channels else _Place.START
        self._place = _Place.THOUGHT if thoughts.inside else start
        self._held = ""  # read, but perhaps a part of a mark
        self._space = ""  # white space at the end of a thought so far
        self._label = "" if thoughts.inside else thoughts.label
        self._thought_before = thoughts.inside
        self._begun = False  # whether this thought has any text
        self._any = False  # whether any thought had
        self._role = ""  # of a message's head what comes before its channel, if it names a function
        self._wrapped = False  # whether the answer is in its marks
        self._answered = False  # whether anything came after the first of them
        self._answer: list[str] = []
        self._thought: list[str] = []
        self._unsure = 0  # tokens since the answer's start that may be half a mark
        self.reasoning_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was met, once one was."""
        return self._stops.stopped_by

    def push(self, token: int) -> TextPiece:
        """Take one more token; return the text that it completes."""
        before = self._place
        mark = self._marks.tokens.get(token)
        if mark is None:
            self._read(self._plain.push(token).text)
        else:
            self._read(self._plain.finish().text)
            self._plain = TextStream(self._ids_to_text)
            self._see(mark, token)
        self._count(before, self._place)
        return self._release()

    def finish(self) -> TextPiece:
        """Return the rest, when no more tokens will come."""
        self._read(self._plain.finish().text)
        self._plain = TextStream(self._ids_to_text)
        held, self._held = self._held, ""
        if self._place is _Place.THOUGHT:
            self._think(held)
        elif self._place is not _Place.HEADER:
            before = self._thought_before and self._place is _Place.START
            self._answer.append(held.lstrip() if before else held)
        return self._release(at_end=True)

    def _release(self, *, at_end: bool = False) -> TextPiece:
        text, reasoning = "".join(self._answer), "".join(self._thought)
        self._answer.clear()
        self._thought.clear()
        return TextPiece(text, self._stops.push(text, at_end=at_end), reasoning)

    def _count(self, before: _Place, after: _Place) -> None:
        """Count a token that was read while `before`, and after which the place is `after`."""
        if _Place.THOUGHT in (before, after):
            self.reasoning_tokens += 1 + self._unsure
            self._unsure = 0
        elif after in (_Place.START, _Place.HEADER):
            self._unsure += 1
        else:
            self._unsure = 0

    def _read(self, text: str) -> None:
        """Text that is no token's mark."""
        while text:
            match self._place:
                case _Place.START:
                    text = self._read_start(text)
                case _Place.THOUGHT:
                    text = self._read_thought(text)
                case _Place.ANSWER:
                    self._read_answer(text)
                    return
                case _Place.HEADER:
                    self._held += text
                    return

    def _read_start(self, text: str) -> str:
        """Read before the answer; returns what is to be read elsewhere."""
        self._held += text
        found = self._held.lstrip()
        wraps = [self._marks.wrap[0]] if self._marks.wrap and self._thought_before else []
        for mark in (*self._opens, *wraps):
            if found.startswith(mark):
                self._held = ""
                if mark in wraps:
                    self._place, self._wrapped = _Place.ANSWER, True
                    return found[len(mark) :]
                self._begin_thought()
                return found[len(mark) :]
        if not found or any(mark.startswith(found) for mark in (*self._opens, *wraps)):
            return ""
        rest = found if self._thought_before else self._held
        self._held, self._place = "", _Place.ANSWER
        return rest

    def _read_thought(self, text: str) -> str:
        self._held += text
        if self._label:
            if self._label.startswith(self._held) and self._held != self._label:
                return ""
            self._held = self._held.removeprefix(self._label)
            self._label = ""
        found = [(at, mark) for mark in self._closes if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            held, self._held = self._held, ""
            self._think(held[:at])
            self._end_thought()
            return held[at + len(mark) :]
        keep = max((overlap(self._held, mark) for mark in self._closes), default=0)
        end = len(self._held) - keep
        self._think(self._held[:end])
        self._held = self._held[end:]
        return ""

    def _read_answer(self, text: str) -> None:
        if self._wrapped and self._marks.wrap:
            self._held += text
            if not self._answered:
                self._held = self._held.lstrip()
                self._answered = bool(self._held)
            close = self._marks.wrap[1]
            at = self._held.find(close)
            if at >= 0:
                text = self._held[:at].rstrip() + self._held[at + len(close) :]
                self._held, self._wrapped = "", False
            else:
                end = len(self._held) - overlap(self._held, close)
                text = self._held[:end].rstrip()
                self._held = self._held[len(text) :]
        self._answer.append(text)

    def _see(self, mark: str, token: int) -> None:
        """A mark that is a token."""
        if self._marks.channels:
            self._see_channel(mark)
        elif self._place is _Place.START and mark in self._marks.opens:
            self._held = ""
            self._begin_thought()
        elif self._place is _Place.THOUGHT and mark in self._marks.closes:
            held, self._held = self._held, ""
            self._think(held)
            self._end_thought()
        elif not (self._place is _Place.THOUGHT and not self._begun):
            # A model may repeat the mark that the prompt ended with; elsewhere it means nothing.
            self._read(self._ids_to_text([token]))

    def _see_channel(self, mark: str) -> None:
        """A mark of harmony: <|start|>role<|channel|>name<|message|>text<|end|>."""
        held, self._held = self._held, ""
        if self._place is _Place.THOUGHT:
            self._think(held)
        if mark == "<|message|>":
            head = self._role + held
            call = " to=" in head
            if held.split()[:1] == ["analysis"] and not call:
                self._begin_thought()
            else:
                self._place = _Place.ANSWER
                if call:  # of a function, which only the head names
                    self._answer.append(head)
        else:
            from_head = self._place is _Place.HEADER and " to=" in held
            self._role = f"{held} " if mark == "<|channel|>" and from_head else ""
            self._place = _Place.ANSWER if mark == "<|end|>" else _Place.HEADER

    def _begin_thought(self) -> None:
        self._place, self._label = _Place.THOUGHT, self._marks.label
        self._space = "\n\n" if self._any else ""
        self._begun, self._thought_before = False, True

    def _end_thought(self) -> None:
        self._place, self._space = _Place.START, ""

    def _think(self, text: str) -> None:
        """More of a thought, without the white space around it."""
        if not self._begun:
            text = text.lstrip()
            if not text:
                return
            self._begun = self._any = True
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]
        self._thought.append(text[:end])
