"""Reads and writes arguments between tags.

Strings are not quoted between their tags, so only the function's schema, or a flag, distinguishes
them from other values, which are JSON. Invariant: `read_tags` reads what `written_tags` writes.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.decoding.text import overlap
from paceline.tools.call_text import CallText, Emit, NotACall, Reader, decoded, quoted
from paceline.tools.forms import ToolForm
from paceline.tools.literals import CONSTANTS, written_value
from paceline.tools.parameters import Schema, json_type, json_types, mapping

CDATA = "<![CDATA["
_MARKUP = re.compile(r"[<&\n]")
"""Characters in a string that require `CDATA`."""

_FLAG = re.compile(r"[a-z]*")


def written_tags(form: ToolForm, arguments: Mapping[str, Any]) -> str:
    tags = form.tags
    return "".join(
        f"{tags.open}{key}{tags.head(is_text=isinstance(value, str))}"
        f"{written_tag_value(form, value)}{tags.close}{tags.after}"
        for key, value in arguments.items()
    )


def written_tag_value(form: ToolForm, value: Any) -> str:
    if not isinstance(value, str):
        return written_value(form, value)
    return f"{CDATA}{value}]]>" if form.tags.cdata and _MARKUP.search(value) else value


def read_tags(form: ToolForm, schema: Schema, source: CallText, emit: Emit) -> Reader[None]:
    """Read consecutive arguments, up to other text. Raises NotACall if one is cut off."""
    tags = form.tags
    emit("{")
    begun = False
    while True:
        yield from source.next()
        if not (yield from source.skip(tags.open)):
            break
        key = yield from source.run(tags.name)
        types = json_types(mapping(schema.get("properties")).get(key), schema)
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
    """Read a value up to its closing tag, without a line break directly before that tag.

    The tag is text unless another argument or the end of the call follows it.
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


def _typed(text: str, types: set[str]) -> str:
    """Return the JSON of a value written as text, of the first type that fits; else a string."""
    try:
        value = CONSTANTS[text.strip()] if text.strip() in CONSTANTS else decoded(text)
    except NotACall:
        value = text if "string" in types else _literal(text)
    kind = json_type(value)
    is_of_type = not types or kind in types or (kind == "integer" and "number" in types)
    return json.dumps(value if is_of_type or "string" not in types else text, ensure_ascii=False)


def _literal(text: str) -> Any:
    """Return a list or an object in Python's notation, which some templates use; else the text."""
    if text.strip()[:1] not in ("[", "{"):
        return text
    try:
        value = ast.literal_eval(text.strip())
        decoded(json.dumps(value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, NotACall):
        return text
    return value
