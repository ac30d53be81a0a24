"""Reads arguments of tool calls that are between tags, as JSON text, piece by piece.

Strings are between their tags as they are, so that the function's schema, or a flag, tells them
from other values. Invariant: what `call_values.py` writes between tags is read back here.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.constraints.call_form import ToolForm
from paceline.constraints.call_text import CallText, Emit, NotACall, Reader, decoded, quoted
from paceline.constraints.schemas import resolved
from paceline.decoding.text import overlap

Schema = Mapping[str, Any]

CDATA = "<![CDATA["
MARKUP = re.compile(r"[<&\n]")
"""What a string has that needs `CDATA`."""

CONSTANTS: Mapping[str, Any] = {
    **{"True": True, "False": False, "None": None},
    **{"true": True, "false": False, "null": None},
}
_MAX_DEPTH = 64
_FLAG = re.compile(r"[a-z]*")


def read_tags(form: ToolForm, schema: Schema, source: CallText, emit: Emit) -> Reader[None]:
    """Read arguments, again and again, up to what is none. Raises NotACall if one breaks off."""
    tags = form.tags
    assert tags is not None
    emit("{")
    begun = False
    while True:
        yield from source.next()
        if not (yield from source.skip(tags.open)):
            break
        key = yield from source.run(tags.name)
        types = parameter_types(schema, key)
        if tags.flagged:
            yield from source.expect('" string="')
            types = {"string"} if (yield from source.run(_FLAG)) == "true" else types - {"string"}
        yield from source.expect(tags.middle.replace("><", "> <"))
        if tags.middle.endswith("\n"):
            yield from source.skip("\n")
        emit(f"{', ' if begun else ''}{json.dumps(key, ensure_ascii=False)}: ")
        close = tags.close
        if tags.cdata and (yield from source.skip(CDATA)):
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
    assert form.tags is not None
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


def parameter_types(schema: Schema, key: str) -> set[str]:
    """JSON types of a parameter; none if its schema does not say."""
    properties = schema.get("properties")
    parameter = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(parameter, schema, 0)


def _types(schema: Any, root: Schema, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    if "type" in schema:
        named = schema["type"]
        return {str(kind) for kind in (named if isinstance(named, list) else [named])}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
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
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return json.dumps(value if fits or "string" not in types else text, ensure_ascii=False)


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
