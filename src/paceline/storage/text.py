"""Text that is read, and text that is shown: the one place that judges bytes and characters.

Invariant: shown text moves no cursor and changes no setting of a terminal, and a value in a line
begins no other line.
"""

import codecs
import os
import re
from collections.abc import Callable
from pathlib import Path

from paceline.errors import InvalidRequest, PacelineError

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark begins the same
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order mark -> encoding."""

_TEXT_SHARE = 3
"""1 / this of the characters of a text are such bytes at most; with more it is another encoding."""

_BYTES = re.compile("[\udc80-\udcff]+")
"""What Python makes of bytes that its encoding lacks, as in a path."""

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_LINE = re.compile(f"[{_CONTROLS}\t\u2028\u2029\u202a-\u202e\u2066-\u2069]|\n(?!  )")
"""Also line ends, but before an indented line, and what reverses letters: an answer may need it."""


def unmarked(content: bytes, source: object, error: type[PacelineError] = InvalidRequest) -> bytes:
    """Return UTF-8 without its byte order mark. Raise `error` for UTF-16 and UTF-32."""
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), None)
    if encoding or b"\0\0" in (content[0:4:2], content[1:4:2]):
        raise error(f"{source} is {encoding or 'UTF-16'} text; save it as UTF-8")
    return content.removeprefix(codecs.BOM_UTF8)


def decode(
    content: bytes,
    source: object,
    notify: Callable[[str], None] | None = None,
    *,
    error: type[PacelineError] = InvalidRequest,
) -> str:
    """Return UTF-8 text without its byte order mark.

    With `notify`, a few invalid bytes become U+FFFD, and it gets a line with the position of one.
    Raises `error` for text in another encoding, and for binary content.
    """
    content = unmarked(content, source, error)
    try:
        return content.decode()
    except UnicodeDecodeError as failure:
        start = failure.start
    *lines, last = content[:start].split(b"\n")
    where = (
        f"{source} is not UTF-8 text: line {len(lines) + 1}, byte {len(last) + 1} is "
        f"0x{content[start]:02X}"
    )
    text = content.decode(errors="surrogateescape")
    readable, count = re.subn("[\udc80-\udcff]", "\ufffd", text)
    if notify is None or count * _TEXT_SHARE > len(text) or "\0" in text:
        raise error(f"{where}; `iconv -t UTF-8` converts text of another encoding")
    notify(f"[{where}; such bytes, {count} in all, are read as U+FFFD]")
    return readable


def visible(text: str, *, line: bool = False) -> str:
    r"""Return text with its control characters as in `\x1b`; newlines and tabs stay.

    With `line` it is a line with values such as names: newlines and tabs are replaced as well, and
    only indented lines may follow.
    """
    text = _BYTES.sub(lambda match: text_bytes(match[0]).decode(errors="backslashreplace"), text)
    pattern = _IN_LINE if line else _IN_TEXT
    return pattern.sub(lambda control: control[0].encode("unicode_escape").decode(), text)


def text_bytes(text: object) -> bytes:
    """Return the bytes of a path or an argument, in UTF-8 whatever the locale is."""
    return str(text).encode("utf-8", "surrogateescape")


def path_text(path: object) -> str:
    """Return a path as UTF-8, whatever the locale is."""
    return text_bytes(path).decode("utf-8", "surrogateescape")


def path_of(text: str) -> Path:
    """Return the path that a UTF-8 text names, whatever the locale is."""
    return Path(os.fsdecode(text_bytes(text)))
