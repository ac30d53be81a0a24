"""Arguments between tags: read, written, and as a grammar.

Strings are between their tags as they are, so that the function's schema, or a flag, tells them
from other values, which are JSON. Invariant: what is written here, and what a grammar here allows,
is read back here.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.constraints.call_text import CallText, Emit, NotACall, Reader, decoded, quoted
from paceline.constraints.literals import CONSTANTS, written_value
from paceline.constraints.schemas import constants, mapping, resolved
from paceline.constraints.tool_forms import ToolForm
from paceline.constraints.value_grammar import EMPTY, ValueGrammar, escaped_text, length_bounds
from paceline.decoding.text import overlap

Schema = Mapping[str, Any]

_CDATA = "<![CDATA["
_MARKUP = re.compile(r"[<&\n]")
"""What a string has that needs `_CDATA`."""

_MAX_DEPTH = 64
_FLAG = re.compile(r"[a-z]*")
_TOKEN = re.compile(r"<\[[0-9]+\]>")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def written_tags(form: ToolForm, arguments: Mapping[str, Any]) -> str:
    tags = form.tags
    return "".join(
        f"{tags.open}{key}{tags.head(is_text=isinstance(value, str))}"
        f"{_written(form, value)}{tags.close}{tags.after}"
        for key, value in arguments.items()
    )


def _written(form: ToolForm, value: Any) -> str:
    if not isinstance(value, str):
        return written_value(form, value)
    return f"{_CDATA}{value}]]>" if form.tags.cdata and _MARKUP.search(value) else value


class TagGrammar(ValueGrammar):
    """Makes the rules for one function's arguments."""

    def _is_writable(self, key: str) -> bool:
        return key != "" and self._form.tags.name.fullmatch(key) is not None

    def _arguments(self) -> str:
        self._close = self._written(self._form.tags.close + self._form.tags.after)
        return self._ordered(self._root, self._tagged, self._free_tagged(), EMPTY)

    def _tagged(self, key: str, schema: Any) -> str:
        schema = mapping(schema)
        reference = schema.get("$ref")
        known = isinstance(reference, str)
        target = mapping(resolved(self._root, str(reference))) if known else schema
        values = constants(target)
        if values:
            heads = (self._head(key, is_text=isinstance(value, str)) for value in values)
            texts = (
                f"{head} {self._written(_written(self._form, value))}"
                for head, value in zip(heads, values, strict=True)
            )
            return f"({' | '.join(texts)}) {self._close}"
        kinds = target.get("type")
        if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
            bounds = target if kinds == "string" else {}
            return self._tagged_text(self._head(key, is_text=True), bounds)
        return f"{self._head(key, is_text=False)} {self._value(schema)} {self._close}"

    def _free_tagged(self) -> str:
        """Any argument, as a text; only needed if no properties are named."""
        if self._root.get("properties"):
            return ""
        names = f"/[^{escaped_text(self._form.tags.middle[0])}\\n]+/"
        middle = self._written(self._form.tags.head(is_text=True))
        return self._tagged_text(f"{self._written(self._form.tags.open)} {names} {middle}", {})

    def _head(self, key: str, *, is_text: bool) -> str:
        return self._written(f"{self._form.tags.open}{key}{self._form.tags.head(is_text=is_text)}")

    def _tagged_text(self, head: str, schema: Mapping[str, Any]) -> str:
        """What comes before a text, the text, and its tag; texts like the tag are left out."""
        bounds = length_bounds(schema)
        text = rf"(.|\n){bounds}"
        if not self._form.tags.cdata:
            return f"{head} {self._text_before(self._form.tags.close, text)}"
        marked = self._text_before(f"]]>{self._form.tags.close}", text)
        plain = f"/[^<&\\n]{bounds}/ {self._close}"
        return f"{head} ({plain} | {json.dumps(_CDATA)} {marked})"

    def _text_before(self, close: str, text: str) -> str:
        """A rule for what the regular expression `text` matches, and the tag after it."""
        letters = escaped_text(close.strip())
        prefix, rest = cut_at_token(self._written(close + self._form.tags.after))
        if rest:  # a token, which no text has
            name = f"{self._name}T{len(self._rules)}".upper()
            self._rules.append(
                f"{name}: /{text}{escaped_text(prefix)}/ & ~/(.|\\n)*{letters}(.|\\n)*/"
            )
            return f"{name} {rest}"
        end = escaped_text((self._form.end or self._form.close).strip())
        follows = f"({escaped_text(self._form.tags.open)}|{end})"
        bad = rf"/(.|\n)*{letters}\s*{follows}(.|\n)*/"
        return self._rule(
            rf"/{text}{escaped_text(close + self._form.tags.after)}/ & ~{bad}", "[lazy]"
        )


def cut_at_token(lark: str) -> tuple[str, str]:
    """The letters before the first token in quoted texts and tokens, and the rest; "" without one.

    A text goes as far as it can, so that it has to match the letters before a token as well.
    """
    token = _TOKEN.search(lark)
    if token is None:
        return "", ""
    letters = _QUOTED.findall(lark[: token.start()])
    return "".join(map(json.loads, letters)), lark[token.start() :]


def read_tags(form: ToolForm, schema: Schema, source: CallText, emit: Emit) -> Reader[None]:
    """Read arguments, again and again, up to what is none. Raises NotACall if one breaks off."""
    tags = form.tags
    emit("{")
    begun = False
    while True:
        yield from source.next()
        if not (yield from source.skip(tags.open)):
            break
        key = yield from source.run(tags.name)
        types = _types(mapping(schema.get("properties")).get(key), schema, 0)
        if tags.flagged:
            yield from source.expect('" string="')
            types = {"string"} if (yield from source.run(_FLAG)) == "true" else types - {"string"}
        yield from source.expect(tags.middle.replace("><", "> <"))
        if tags.middle.endswith("\n"):
            yield from source.skip("\n")
        emit(f"{', ' if begun else ''}{json.dumps(key, ensure_ascii=False)}: ")
        close = tags.close
        if tags.cdata and (yield from source.skip(_CDATA)):
            types, close = {"string"}, f"]]>{close}"
        if types == {"string"}:
            emit('"')
            yield from _value(form, close, source, lambda text: emit(quoted(text)))
            emit('"')
        else:
            read: list[str] = []
            yield from _value(form, close, source, read.append)
            emit(_typed("".join(read), types))
        begun = True
    emit("}")


def _value(form: ToolForm, close: str, source: CallText, emit: Emit) -> Reader[None]:
    """Read a value up to its closing tag, without the line break before that if it has one.

    The tag is text where neither another argument nor the end of the call follows it.
    """
    tag, line = close.lstrip(), close.startswith("\n")
    while True:
        place = source.text.find(tag, source.at)
        if place < 0:
            text = source.text[source.at :]
            keep = max(overlap(text, tag), overlap(text, close))
            emit(text[: len(text) - keep])
            source.at += len(text) - keep
            yield from source.more()
            continue
        has_line = line and place > source.at and source.text[place - 1] == "\n"
        start = place - 1 if has_line else place
        emit(source.text[source.at : start])
        text = source.text[start : place + len(tag)]
        source.at = place + len(tag)
        after = source.at
        yield from source.next()
        for end in (form.tags.open, (form.end or form.close).strip()):
            if (yield from source.begins(end)):
                return
        source.at = after
        emit(text)


def _types(schema: Any, root: Schema, depth: int) -> set[str]:
    """JSON types of a parameter; none if its schema does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    if "type" in schema:
        named = schema["type"]
        return {str(kind) for kind in (named if isinstance(named, list) else [named])}
    if values := constants(schema):
        return {_type_of(value) for value in values}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(resolved(root, reference), root, depth + 1)
    types: set[str] = set()
    for name in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(name)
        for alternative in listed if isinstance(listed, list) else ():
            kinds = _types(alternative, root, depth + 1)
            if not kinds and name != "allOf":
                return set()
            types |= kinds
    return types


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _typed(text: str, types: set[str]) -> str:
    """JSON of a value that is written as text, of the first type that fits; else a string."""
    try:
        value = CONSTANTS[text.strip()] if text.strip() in CONSTANTS else decoded(text)
    except NotACall:
        value = text if "string" in types else _literal(text)
    kind = _type_of(value)
    is_of_type = not types or kind in types or (kind == "integer" and "number" in types)
    return json.dumps(value if is_of_type or "string" not in types else text, ensure_ascii=False)


def _literal(text: str) -> Any:
    """A list or an object as Python writes them, which some templates do; else the text."""
    if text.strip()[:1] not in ("[", "{"):
        return text
    try:
        value = ast.literal_eval(text.strip())
        decoded(json.dumps(value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, NotACall):
        return text
    return value
