"""Divides a response into parts, as it grows or whole: reasoning, text and tool calls.

Independent of tokenizers, models and APIs. Invariants: one part is open at a time, the last one; no
text is lost: text that is not a call remains text, without signs; and the calls do not depend on
how the text was cut into pieces. With a `signed` format, a tag that was typed letter by letter is
text. A stream yields a call once its name is certain, so a call that the token limit cuts has
incomplete arguments; in a whole response such a call is text.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from paceline.decoding.text import overlap, unsigned
from paceline.decoding.types import Piece
from paceline.tools.call_text import CallText, Emit, NotACall, Reader, decoded
from paceline.tools.forms import FORMS, HERMES, NAME, Syntax, ToolForm
from paceline.tools.literals import read_literals, written_literals
from paceline.tools.tags import read_tags, written_tags


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object, as text."""


class PartKind(StrEnum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Part:
    """A part of a response so far, and the changes of the last `push`."""

    kind: PartKind
    name: str = ""
    """The called function."""
    call_id: str = ""
    """The id of a call, as the model's chat template requires."""
    text: str = ""
    """Reasoning, text, or the arguments of a call: a JSON object."""
    pieces: list[Piece] = field(default_factory=list)
    """The tokens of a text."""
    whole: bool = False
    """True if a call is complete: the token limit may cut one."""
    index: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    new: str = ""
    new_pieces: list[Piece] = field(default_factory=list)
    opens: bool = True
    closes: bool = False
    """True if it will not grow any more."""

    def grow(self, text: str) -> None:
        self.text += text
        self.new += text


_LABEL = re.compile(r"\w*")
_CALL_KEYS = ("name", "type", "id", "arguments", "parameters")

Functions = Mapping[str, Mapping[str, Any]]
"""A function's name -> the JSON schema of its arguments."""


class PartStream:
    def __init__(
        self,
        form: ToolForm | None = HERMES,
        functions: Functions | None = None,
        *,
        whole: bool = False,
        forced: bool = False,
    ) -> None:
        """Prepare for calls in a format; None: the text has no calls.

        With `whole`, only calls of complete groups are parts. With `forced`, text is also dropped:
        the grammar allows only calls, so other text is not the model's intent.
        """
        self.parts: list[Part] = []
        self._form = form or HERMES
        self._functions = functions or {}
        self._whole = whole or forced
        self._forced = forced
        self._source, self._reader = CallText(), self._read() if form else None
        self._pending: list[Part] = []  # calls of an incomplete group
        self._pieces: list[Piece] = []  # tokens whose text is not in any part yet
        self._hold: int | None = None  # where content starts if this is not a call
        self._space = ""  # white space at the end of the content so far
        self._trim = False  # whether white space is skipped, after a call

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind is PartKind.CALL]

    def text(self, kind: PartKind) -> str:
        """Return the text of all parts of a kind so far."""
        return "".join(part.text for part in self.parts if part.kind is kind)

    def push(
        self, text: str, reasoning: str = "", pieces: Sequence[Piece] = (), *, end: bool = False
    ) -> list[Part]:
        """Add reasoning, the text after it, and the tokens of both.

        Returns the parts that may have changed, in order: the open one, and new ones. The `end`
        closes the last part; a response without parts has an empty text.
        """
        before = max(len(self.parts) - 1, 0)
        for part in self.parts[before:]:
            part.new, part.new_pieces, part.opens = "", [], False
        if reasoning:
            self._grow(PartKind.REASONING, reasoning)
        thought = bool(self.parts) and self.parts[-1].kind is PartKind.REASONING
        # Tokens of reasoning, and of the tags after it, do not belong to the text.
        self._pieces += [piece for piece in pieces if piece.text or not thought]
        if self._reader is not None:
            self._source.text += text
            self._source.ended = end
            next(self._reader, None)
        elif text:
            self._grow(PartKind.TEXT, unsigned(text))
        if end:
            if self._space and not self.calls and not self._forced:
                self._grow(PartKind.TEXT, self._space)
            if not self.parts:
                self._open(Part(PartKind.TEXT))
            self.parts[-1].closes = True
        changed = self.parts[before:]
        for part in changed[:-1]:
            part.closes = True
        return changed

    def _grow(self, kind: PartKind, text: str) -> None:
        if not (self.parts and self.parts[-1].kind is kind):
            self._open(Part(kind))
        part = self.parts[-1]
        part.grow(text)
        if kind is PartKind.TEXT:
            part.pieces += self._pieces
            part.new_pieces += self._pieces
            self._pieces.clear()

    def _open(self, part: Part) -> None:
        part.index = len(self.parts)
        self.parts.append(part)

    def _read(self) -> Reader[None]:
        source, mark = self._source, self._form.mark
        if self._form.bare:
            begins = (yield from source.next()) == "{"
            source.at = 0
            if begins:
                yield from self._attempt("")
        while (yield from self._find_mark()):
            yield from self._attempt(mark)

    def _attempt(self, mark: str) -> Reader[None]:
        """Read a group after its tag; text that is not a call is read again, or is content."""
        source, start = self._source, self._source.at
        self._hold = start
        source.at += len(mark)
        try:
            yield from self._group()
            self._commit()
        except NotACall:
            self._pending.clear()
            if self._hold == start:
                self._emit_text(mark)
                source.at = start + len(mark)
            elif self._hold is not None:
                source.at = self._hold
        self._hold = None

    def _find_mark(self) -> Reader[bool]:
        """Read content up to a tag, which is not skipped; return False at the end of the text."""
        source, mark = self._source, self._form.mark
        while True:
            start = source.text.find(mark, source.at)
            if start >= 0:
                self._emit_text(source.text[source.at : start])
                source.at = start
                return True
            text = source.text[source.at :]
            keep = 0 if source.ended else overlap(text, mark)
            self._emit_text(text[: len(text) - keep])
            source.text, source.at = text[len(text) - keep :], 0
            if source.ended:
                return False
            yield

    def _emit_text(self, text: str) -> None:
        """Append content; white space waits for the text that follows."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]
        if (text := unsigned(text[:end])) and not self._forced:
            self._grow(PartKind.TEXT, text)

    def _commit(self) -> None:
        for call in self._pending:
            self._open(call)
            self._pieces.clear()
        self._pending.clear()
        self._hold = None
        self._trim = True

    def _group(self) -> Reader[None]:
        """Read the calls between a pair of tags."""
        source, form = self._source, self._form
        if (yield from source.next()) == "[":
            source.at += 1
            yield from self._call()
            while (yield from source.next()) == ",":
                source.at += 1
                self._hold = self._hold if self._whole else source.at
                yield from self._call()
            yield from source.expect("]")
        else:
            yield from self._call()
            while form.between is not None and (yield from self._goes_on()):
                self._hold = self._hold if self._whole else source.at
                yield from self._call()
        yield from source.next()
        yield from source.skip_last(form.close.strip().removeprefix("]"))

    def _goes_on(self) -> Reader[bool]:
        """Return whether another call comes next in the group, after white space."""
        yield from self._source.next()
        return (yield from self._source.begins(self._form.before))

    def _call(self) -> Reader[None]:
        if (yield from self._source.next()) == "{" and not self._form.keyed:
            yield from self._object_call()
        elif self._form.as_object and not self._form.keyed and self._form.name != "mistral":
            raise NotACall
        else:
            older = self._form.name == "mistral"
            yield from self._named_call(FORMS["mistral-args"] if older else self._form)

    def _named_call(self, form: ToolForm) -> Reader[None]:
        """Read a call that has its function's name before its arguments."""
        source, after = self._source, form.after
        yield from source.expect(form.before)
        name = yield from source.run(NAME)
        if form.label is not None:
            mark, text = form.label
            name = re.sub(f"{re.escape(mark)}{text}$", "", name)
            if (yield from source.skip(mark)):
                yield from source.run(_LABEL)
        for part in form.optional:
            yield from source.next()
            yield from source.skip(part)
            after = after.replace(part, "", 1)
        yield from source.expect(after)
        self._begin(name)
        yield from _read_arguments(
            form, self._functions.get(name, {}), source, self._emit_arguments
        )
        yield from source.expect(form.end)
        self._end()

    def _object_call(self) -> Reader[None]:
        """Read a call that is a JSON object, with its keys in any order."""
        source, name, arguments = self._source, "", ""
        begun = False
        yield from source.expect("{")
        while True:
            key = yield from source.json_string()
            yield from source.expect(":")
            if key == "name":
                name = yield from source.json_string()
                self._check(name)
            elif self._form.bare and key not in _CALL_KEYS:
                raise NotACall
            elif key not in ("arguments", "parameters"):
                yield from source.json(lambda piece: None)
            elif name and (yield from source.next()) == "{":
                self._begin(name)
                begun = True
                yield from source.json(self._emit_arguments)
            else:
                read: list[str] = []
                yield from source.json(read.append)
                arguments = "".join(read)
            if (yield from source.next()) != ",":
                break
            source.at += 1
        yield from source.expect("}")
        if not begun:
            arguments = _object(arguments or "{}")
            self._begin(name)
            self._emit_arguments(arguments)
        self._end()

    def _begin(self, name: str) -> None:
        self._check(name)
        self._call_part = Part(PartKind.CALL, name, self._form.new_id())
        self._pending.append(self._call_part)
        if not self._whole:
            self._commit()

    def _check(self, name: str) -> None:
        # A bare call has no tag, so that only the name distinguishes it from other JSON.
        if not name or (self._form.bare and name not in self._functions):
            raise NotACall

    def _emit_arguments(self, text: str) -> None:
        self._call_part.grow(text)
        if not self._whole:
            self._pieces.clear()

    def _end(self) -> None:
        self._call_part.whole = True
        if not self._whole:
            self._pieces.clear()


def written_calls(form: ToolForm, calls: Sequence[ToolCall]) -> str:
    """Return calls as a model writes them. Raises ValueError unless arguments are JSON objects."""
    texts = [_written_call(form, call, place) for place, call in enumerate(calls)]
    if form.between is not None:
        texts = [form.between.join(texts)]
    mark = "" if form.bare else form.mark
    return form.separator.join(f"{mark}{form.lead}{text}{form.close}" for text in texts)


def _written_call(form: ToolForm, call: ToolCall, place: int) -> str:
    name = json.dumps(call.name, ensure_ascii=False)[1:-1] if form.as_object else call.name
    if form.label is not None:
        name += f"{form.label[0]}{place:0{form.id_length or 1}}"
    return f"{form.before}{name}{form.after}{_written_arguments(form, call.arguments)}{form.end}"


def _written_arguments(form: ToolForm, text: str) -> str:
    """Return a JSON object's text as a model writes arguments. Raises ValueError for others."""
    if form.syntax is Syntax.JSON:
        return text
    arguments = json.loads(text)
    if not isinstance(arguments, dict):
        raise ValueError(f"{text[:40]!r} is not a JSON object")  # noqa: TRY004 - a wrong value
    write = written_tags if form.syntax is Syntax.TAGS else written_literals
    return write(form, arguments)


def _read_arguments(
    form: ToolForm, schema: Mapping[str, Any], source: CallText, emit: Emit
) -> Reader[None]:
    """Read a call's arguments to their end. Raises NotACall if they are cut off or invalid."""
    if form.syntax is Syntax.TAGS:
        yield from read_tags(form, schema, source, emit)
    elif form.syntax is not Syntax.JSON:
        yield from read_literals(form, source, emit)
    elif (yield from source.next()) == "{":
        yield from source.json(emit)
    else:
        raise NotACall


def _object(text: str) -> str:
    """Return the JSON text of an object, which some models write as a JSON string."""
    value = decoded(text)
    if isinstance(value, str):
        text, value = value, decoded(value)
    if not isinstance(value, dict):
        raise NotACall
    return text
