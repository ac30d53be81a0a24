"""Incremental detokenization: token ids to whole characters, without stop strings.

Depends on one tokenizer function, ids -> text. Invariant: emitted text never changes, and is the
same however the tokens were grouped into blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from paceline.decoding.types import NO_TOKEN, Piece

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"
"""The decoder's replacement for bytes that do not (yet) make a character."""

SIGN = "\ud800"
"""Precedes a tag that a token wrote; the same letters in a text are not a tag. No tokenizer decodes
to an unpaired surrogate, so no text contains it."""

_WINDOW = 16
"""Tokens decoded together before the window moves; bounds the work per token."""

_OVERLAPS = range(4, 8)
"""Tokens kept when the window moves: some tokenizers decode a token differently at a text's start.
The first number that cuts no character is used; a character has up to 4 tokens, one per byte."""


class StopStrings:
    """Cuts a text before its earliest stop string, and holds back a possible start of one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty; expected at least one character")
        self._stops = tuple(stops)
        self._held = ""  # possible start of a stop string
        self.stopped_by: str | None = None
        """The stop string that ended the text; None so far."""

    def push(self, text: str, *, at_end: bool = False) -> str:
        """Append text; return the text that is now final. At the end nothing is held back."""
        if not self._stops:
            return text
        if self.stopped_by is not None:
            return ""
        text, self.stopped_by, self._held = cut(self._held + text, self._stops)
        if at_end and self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text


class TextStream:
    """Detokenizes one response, token by token.

    Holds back broken characters that more tokens may complete, and a possible start of a stop
    string.
    """

    reasoning_tokens = 0
    """Number of reasoning tokens; see `decoding/reasoning.py`."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = StopStrings(stops)
        self._window: list[int] = []
        self._taken = 0  # characters of the window's text that were returned

    @property
    def stopped_by(self) -> str | None:
        return self._stop.stopped_by

    def push(self, token: int) -> Piece:
        """Append a token; return it with the text that it completes.

        Once `stopped_by` is set, all text before the stop string has been returned.
        """
        self._window.append(token)
        text = self._decode(self._window)
        # More tokens may complete broken characters at the end.
        fresh = text.rstrip(_BROKEN)[self._taken :]
        self._taken += len(fresh)
        # Not with text held back: it would be lost if the kept tokens have no text.
        if len(self._window) > _WINDOW and self._taken == len(text):
            for kept in _OVERLAPS:
                tail = self._decode(self._window[-kept:])
                if _BROKEN not in tail:
                    self._window = self._window[-kept:]
                    self._taken = len(tail)
                    break
        return Piece(token, unsigned(fresh), self._stop.push(fresh))

    def finish(self, last: Piece = NO_TOKEN) -> Piece:
        """End the response; return `last` with the text held back, including broken characters."""
        fresh = self._decode(self._window)[self._taken :] if self._window else ""
        return last.extended(unsigned(fresh), self._stop.push(fresh, at_end=True))


def showing(decode: Decode, shown: Mapping[int, str]) -> Decode:
    """Return `decode` with text for tokens that it omits: id -> text."""
    if not shown:
        return decode

    def decoded(ids: Sequence[int]) -> str:
        return "".join(
            "".join(map(shown.__getitem__, run)) if is_shown else decode([*run])
            for is_shown, run in groupby(ids, shown.__contains__)
        )

    return decoded


def unsigned(text: str) -> str:
    return text.replace(SIGN, "")


def cut(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """Return the text before its earliest mark, the mark, and the text after it.

    Without a mark (None), the last text is the possible start of one.
    """
    places = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if places:
        at, mark = min(places)
        return text[:at], mark, text[at + len(mark) :]
    end = len(text) - max((overlap(text, mark) for mark in marks), default=0)
    return text[:end], None, text[end:]


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` that is a suffix of `text`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
