"""Reads the text of tool calls as it grows.

A reader is a generator that yields when it needs more text. So it is written as if all text were
there, and its results do not depend on how the text was cut. Values become JSON text, piece by
piece.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
Reader = Generator[None, None, _T]
"""Yields when it needs more text; returns the value that it read."""

Emit = Callable[[str], None]
"""Takes the next piece of JSON text."""

_SPACE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN_STRINGS = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r'[^\s,:{}\[\]()"]*')


class NotACall(Exception):
    """The text is not a call, or ends before the call does."""


class CallText:
    """A response's text so far, and the position of its reader."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def more(self) -> Reader[None]:
        """Wait for more text. Raises NotACall at the end of the text."""
        if self.ended:
            raise NotACall
        yield

    def has(self, count: int) -> Reader[None]:
        """Wait for `count` characters. Raises NotACall if the text ends before."""
        while len(self.text) - self.at < count:
            yield from self.more()

    def next(self) -> Reader[str]:
        """Skip white space; return the next character, which is not skipped, or "" at the end."""
        while True:
            space = _SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            yield

    def begins(self, literal: str) -> Reader[bool]:
        """Return whether the text continues with `literal`, which is not skipped."""
        while True:
            text = self.text[self.at : self.at + len(literal)]
            if text == literal or self.ended or not literal.startswith(text):
                return text == literal
            yield

    def skip(self, literal: str) -> Reader[bool]:
        """Skip `literal`, if the text continues with it."""
        follows = yield from self.begins(literal)
        self.at += len(literal) if follows else 0
        return follows

    def skip_last(self, literal: str) -> Reader[None]:
        """Skip `literal`, or the part of it at the end of the text."""
        if not (yield from self.skip(literal)) and literal.startswith(self.text[self.at :]):
            self.at = len(self.text)

    def expect(self, literal: str) -> Reader[None]:
        """Skip the words of `literal`, with any white space. Raises NotACall without them."""
        for word in literal.split():
            yield from self.next()
            if not (yield from self.skip(word)):
                raise NotACall

    def run(self, pattern: re.Pattern[str]) -> Reader[str]:
        """Skip the longest run of characters that `pattern` matches, and return it."""
        start = self.at
        while True:
            match = pattern.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def json_string(self) -> Reader[str]:
        """Read a JSON string. Raises NotACall if there is none."""
        pieces: list[str] = []
        if (yield from self.next()) != '"':
            raise NotACall
        yield from self.json(pieces.append)
        value = decoded("".join(pieces))
        assert isinstance(value, str)
        return value

    def json(self, emit: Emit) -> Reader[None]:
        """Read a JSON value as written. Raises NotACall after an invalid value's last piece."""
        read: list[str] = []

        def piece(end: int) -> None:
            if end > self.at:
                read.append(self.text[self.at : end])
                self.at = end
                emit(read[-1])

        first = yield from self.next()
        if first not in '"{[' or not first:
            text = yield from self.run(_SCALAR)
            decoded(text)
            emit(text)
            return
        depth, quoted = 0, False
        while True:
            pattern = _IN_STRING if quoted else _BETWEEN_STRINGS
            match = pattern.match(self.text, self.at)
            piece(match.end() if match else self.at)
            if self.at == len(self.text):
                yield from self.more()
                continue
            character = self.text[self.at]
            if character == "\\":
                if self.at + 1 == len(self.text):
                    yield from self.more()
                    continue
                piece(self.at + 2)
                continue
            if character == '"':
                quoted = not quoted
            else:
                depth += 1 if character in "{[" else -1
            piece(self.at + 1)
            if not quoted and depth <= 0:
                break
        decoded("".join(read))


def quoted(text: str) -> str:
    """Return the inside of a JSON string. Half a surrogate pair becomes U+FFFD."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded(text: str) -> object:
    """Return the value of JSON text. Raises NotACall if it is invalid or has non-finite numbers."""
    try:
        value = _DECODER.decode(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NotACall from error
    return value


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
