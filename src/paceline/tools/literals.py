"""Reads and writes arguments in Python's syntax and between braces.

The reader converts them to JSON text, piece by piece, as `call_text.py` does. Invariant:
`read_literals` reads back the text of `written_literals`.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.decoding.text import overlap
from paceline.tools.call_text import CallText, Emit, NotACall, Reader, decoded, quoted
from paceline.tools.forms import Syntax, ToolForm

CONSTANTS: Mapping[str, Any] = {
    **{"True": True, "False": False, "None": None},
    **{"true": True, "false": False, "null": None},
}
_MAX_DEPTH = 64
_BARE_KEY = re.compile(r"[^\s:=,{}()\[\]<>\"']*")
_SCALAR = re.compile(r"[^,{}\[\]()<>\"'\n]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ESCAPES |= {character: character for character in "\\'\""}
_HEX = {"x": 2, "u": 4, "U": 8}


def written_value(form: ToolForm, value: Any) -> str:
    """Return a value in a format's syntax; in that of tags, as JSON."""
    python, braces = form.syntax is Syntax.PYTHON, form.syntax is Syntax.BRACES
    comma, colon = (",", ":") if braces else (", ", ": ")
    if braces and isinstance(value, str):
        return f"{form.quote}{value}{form.quote}"
    if isinstance(value, Mapping):
        members = (
            f"{literal_key(form, k)}{colon}{written_value(form, v)}" for k, v in value.items()
        )
        return "{" + comma.join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + comma.join(written_value(form, element) for element in value) + "]"
    if python and (value is None or isinstance(value, bool)):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def literal_key(form: ToolForm, key: str) -> str:
    """Return the key of an object, between quotes if it needs them."""
    bare = form.syntax is Syntax.BRACES and key and _BARE_KEY.fullmatch(key)
    return key if bare else written_value(form, key)


def written_literals(form: ToolForm, arguments: Mapping[str, Any]) -> str:
    if form.syntax is Syntax.BRACES:
        return written_value(form, arguments)
    return ", ".join(f"{key}={written_value(form, value)}" for key, value in arguments.items())


def read_literals(form: ToolForm, source: CallText, emit: Emit) -> Reader[None]:
    """Read arguments to their end. Raises NotACall if they are cut off or invalid."""
    if form.syntax is Syntax.PYTHON:
        yield from _Literals(source, emit, form.quote).members(")", "=")
    else:
        yield from source.expect("{")
        yield from _Literals(source, emit, form.quote).members("}", ":")
        source.at += 1


class _Literals:
    """Reads values in the syntax of Python or of braces."""

    def __init__(self, source: CallText, emit: Emit, quote: str) -> None:
        self.source = source
        self.emit = emit
        self.quote = quote
        self.depth = 0

    def members(self, end: str, colon: str) -> Reader[None]:
        """Read keys and values up to `end`, which is not skipped."""
        self.emit("{")
        begun = False
        while (yield from self.source.next()) != end:
            key = yield from self._key()
            if not key:
                raise NotACall
            yield from self.source.expect(colon)
            self.emit(f"{', ' if begun else ''}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value()
            begun = True
            yield from self._separator(end)
        self.emit("}")

    def _separator(self, end: str) -> Reader[None]:
        """Skip a comma, unless the end comes next."""
        character = yield from self.source.next()
        if character == ",":
            self.source.at += 1
        elif character != end:
            raise NotACall

    def _value(self) -> Reader[None]:
        source = self.source
        first = yield from source.next()
        if first in ("[", "{"):
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise NotACall
            source.at += 1
            if first == "[":
                yield from self._list()
            else:
                yield from self.members("}", ":")
            source.at += 1
            self.depth -= 1
        elif first in ("'", '"') or (yield from self._quotes()):
            self.emit('"')
            yield from self._string(self.emit)
            self.emit('"')
        else:
            self.emit((yield from self._scalar()))

    def _list(self) -> Reader[None]:
        self.emit("[")
        begun = False
        while (yield from self.source.next()) != "]":
            if begun:
                self.emit(", ")
            yield from self._value()
            begun = True
            yield from self._separator("]")
        self.emit("]")

    def _scalar(self) -> Reader[str]:
        text = (yield from self.source.run(_SCALAR)).strip()
        if text in CONSTANTS:
            return json.dumps(CONSTANTS[text])
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if isinstance(value, int | float):
            try:
                return json.dumps(value, allow_nan=False)
            except ValueError as error:
                raise NotACall from error
        if not text or not self.quote:
            raise NotACall
        return json.dumps(text, ensure_ascii=False)  # a word without its tags

    def _key(self) -> Reader[str]:
        first = yield from self.source.next()
        if first not in ("'", '"') and not (yield from self._quotes()):
            return (yield from self.source.run(_BARE_KEY))
        read: list[str] = []
        yield from self._string(read.append)
        return str(decoded(f'"{"".join(read)}"'))

    def _quotes(self) -> Reader[bool]:
        """Return whether a string between the format's tags comes next."""
        if not self.quote:
            return False
        return (yield from self.source.begins(self.quote))

    def _string(self, emit: Emit) -> Reader[None]:
        """Read a string, including its quotes, as the inside of a JSON string."""
        source = self.source
        end, escapes = self.quote, False
        if not (yield from self._quotes()):
            end, escapes = source.text[source.at], True
            end = end * 3 if (yield from source.begins(end * 3)) else end
        source.at += len(end)
        while True:
            quote = source.text.find(end, source.at)
            slash = source.text.find("\\", source.at) if escapes else -1
            if slash >= 0 and not 0 <= quote < slash:
                emit(quoted(source.text[source.at : slash]))
                source.at = slash
                emit(quoted((yield from self._escape())))
            elif quote >= 0:
                emit(quoted(source.text[source.at : quote]))
                source.at = quote + len(end)
                return
            else:
                text = source.text[source.at :]
                keep = overlap(text, end)
                emit(quoted(text[: len(text) - keep]))
                source.at += len(text) - keep
                yield from source.more()

    def _escape(self) -> Reader[str]:
        """Read a Python escape sequence, or several for one character."""
        source = self.source
        yield from source.has(2)
        kind = source.text[source.at + 1]
        digits = _HEX.get(kind)
        if digits is None:
            escape = source.text[source.at : source.at + 2]
            source.at += 2
            return "" if kind == "\n" else _ESCAPES.get(kind, escape)
        yield from source.has(2 + digits)
        text = source.text[source.at + 2 : source.at + 2 + digits]
        try:
            character = chr(int(text, 16))
        except (ValueError, OverflowError) as error:
            raise NotACall from error
        source.at += 2 + digits
        if "\ud800" <= character < "\udc00" and (yield from source.begins("\\u")):
            return character + (yield from self._escape())
        return character
