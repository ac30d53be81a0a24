"""From token ids to text that can be shown: whole characters, no part of a stop string.

Knows nothing of any tokenizer but one function, ids -> text. The rule: what was once emitted is
never taken back, and what is emitted is the same however the tokens were grouped into blocks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"
"""What decoders put where bytes do not (yet) make a character."""

_WINDOW = 16
"""Tokens decoded together before the window is moved on; bounds the work per token."""

_OVERLAP = 4
"""Tokens kept when it moves: some tokenizers write a token differently at a text's start."""


class TextPiece(NamedTuple):
    """The text that a token completes: whole characters, so often none, or that of several."""

    text: str = ""
    """Text of the answer, stop strings not looked at."""
    final: str = ""
    """Text of the answer that may be shown: without what may begin a stop string, and with what
    was held back for earlier tokens and turned out to begin none."""
    reasoning: str = ""
    """Text of the model's reasoning."""

    def __add__(self, other: tuple[str, ...]) -> "TextPiece":  # type: ignore[override]
        """Both, one after the other."""
        return TextPiece(*map("".join, zip(self, other, strict=True)))


class StopStrings:
    """Ends a text before the earliest stop string, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Prepare for one answer.

        Raises:
            ValueError: a stop string is empty.
        """
        if not all(stops):
            raise ValueError("a stop string is empty; expected at least one character")
        self._stops = tuple(stops)
        self._held = ""  # perhaps the beginning of a stop string
        self.stopped_by: str | None = None
        """The stop string that was met, once one was."""

    def push(self, text: str, *, at_end: bool = False) -> str:
        """Take more text; return what is now certain. At the end nothing is held back."""
        if not self._stops:
            return text
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = 0 if at_end else max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class TextStream:
    """Turns tokens into text pieces, one token at a time.

    A piece is held back while it ends in a broken character that more tokens may complete, and
    while its end could be the beginning of a stop string.
    """

    reasoning_tokens = 0
    """Tokens of thoughts; see `decoding/reasoning.py`."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        """Prepare for one answer.

        Raises:
            ValueError: a stop string is empty.
        """
        self._decode = decode
        self._stop = StopStrings(stops)
        self._window: list[int] = []
        self._taken = 0  # characters of the window's text that have been taken from it

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was met, once one was."""
        return self._stop.stopped_by

    def push(self, token: int) -> TextPiece:
        """Take one more token; return the text that it completes.

        Once `stopped_by` is set, the text before the stop string has all been returned.
        """
        self._window.append(token)
        text = self._decode(self._window)
        # A run of broken characters at the end may still become whole ones.
        fresh = text.rstrip(_BROKEN)[self._taken :]
        self._taken += len(fresh)
        # Not while something is held: it would be lost when the tail is tokens without text.
        if len(self._window) > _WINDOW and self._taken == len(text):
            tail = self._decode(self._window[-_OVERLAP:])
            if _BROKEN not in tail:
                self._window = self._window[-_OVERLAP:]
                self._taken = len(tail)
        return TextPiece(fresh, self._stop.push(fresh))

    def finish(self) -> TextPiece:
        """Return the rest, when no more tokens will come (broken characters included)."""
        fresh = self._decode(self._window)[self._taken :] if self._window else ""
        return TextPiece(fresh, self._stop.push(fresh, at_end=True))


def overlap(text: str, mark: str) -> int:
    """The length of the longest proper beginning of `mark` that `text` ends with."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
