"""The grammar of values from their JSON schema, in llguidance's Lark.

It is for arguments in Python's syntax and between braces. Kept are constants, types, arrays,
objects, alternatives, references and the bounds of numbers and lengths; other keywords are ignored,
so that a value may be wider than its schema. One thing is narrower: an object has the properties
that are named, if there are any. Invariant: `tools/literals.py` reads every text that these
grammars allow.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.tools.forms import Syntax, ToolForm
from paceline.tools.literals import literal_key, written_value
from paceline.tools.parameters import constants, mapping, resolved

EMPTY = '""'
"""No text, in Lark."""

_MAX_REPEAT = 2000
"""Larger bounds of lengths are ignored: their automata are slow to make."""

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRINGS = ("minLength", "maxLength", "pattern", "format")
_UNESCAPED = re.compile(r"[^'\"\\\n]+")
_PYTHON_KEY = re.compile(r"[\w.\-]+")


class ValueGrammar:
    """Makes the rules for one function's arguments."""

    def __init__(
        self, form: ToolForm, name: str, schema: Mapping[str, Any], written: Callable[[str], str]
    ) -> None:
        """Prepare for `schema`, which has llguidance's settings for JSON.

        The names of all rules begin with `name`. `written` makes Lark of a text, with the model's
        own tokens for marks in it.
        """
        self._form = form
        self._name = name
        self._root = schema
        self._written = written
        self._settings = schema["x-guidance"]
        self._python, self._braces = form.syntax is Syntax.PYTHON, form.syntax is Syntax.BRACES
        self._comma = json.dumps("," if self._braces else ", ")
        self._rules: list[str] = []
        self._references: dict[str, str] = {}
        self._any = ""

    def lines(self) -> list[str]:
        """Return the rules; `name` is the arguments'. Raises InvalidRequest if one cannot be."""
        for key in mapping(self._root.get("properties")):
            if not self._is_writable(key):
                raise InvalidRequest(
                    f"the parameter {key!r} cannot be written in this model's tool-call format; "
                    "expected letters, digits and underscores"
                )
        return [f"{self._name}: {self._arguments()}", *self._rules]

    def _is_writable(self, key: str) -> bool:
        return not self._python or _PYTHON_KEY.fullmatch(key) is not None

    def _arguments(self) -> str:
        if not self._python:
            return self._object(self._root)

        def member(key: str, value: Any) -> str:
            return f"{json.dumps(f'{key}=')} {self._value(value)}"

        free = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {self._anything()}'
        return self._ordered(self._root, member, free, self._comma)

    def _rule(self, body: str, option: str = "") -> str:
        name = f"{self._name}x{len(self._rules)}"
        self._rules.append(f"{name}{option}: {body}")
        return name

    def _ordered(
        self,
        schema: Mapping[str, Any],
        member: Callable[[str, Any], str],
        free: str,
        between: str,
    ) -> str:
        """Return the rule for an object's members in the schema's order; any if it is open."""
        properties = mapping(schema.get("properties"))
        if not properties:
            closed = schema.get("additionalProperties") is False
            return EMPTY if closed else f"({free} ({between} {free})*)?"
        required = schema.get("required")
        needed = set(map(str, required)) if isinstance(required, list) else set()
        # From the last property on, first is what may begin, rest what may follow a member:
        #     b, optional   first  b | ""            rest  ", " b | ""
        #     a, required   first  a (rest of b)     rest  ", " a (rest of b)
        rest = first = EMPTY
        for key, value in reversed(list(properties.items())):
            member_rule = self._rule(member(key, value))
            begun, begins = f"{between} {member_rule} {rest}", f"{member_rule} {rest}"
            optional = key not in needed
            first = self._rule(f"{begins} | {first}" if optional else begins)
            rest = self._rule(f"{begun} | {rest}" if optional else begun)
        return first

    def _object(self, schema: Mapping[str, Any]) -> str:
        if self._braces:
            free = f'/[A-Za-z0-9_.\\-]+/ ":" {self._anything()}'
        else:
            free = f'%json {{"type": "string"}} ": " {self._anything()}'
        colon = ":" if self._braces else ": "

        def member(key: str, value: Any) -> str:
            head = self._written(f"{literal_key(self._form, key)}{colon}")
            return f"{head} {self._value(value)}"

        return f'"{{" {self._ordered(schema, member, free, self._comma)} "}}"'

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._anything()
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference)
        if values := constants(schema):
            return self._choice(values)
        for name in ("anyOf", "oneOf"):
            if isinstance(alternatives := schema.get(name), list) and alternatives:
                return self._rule(" | ".join(map(self._value, alternatives)))
        kinds = schema.get("type")
        if kinds is None:
            kinds = "object" if "properties" in schema else "array" if "items" in schema else ""
        several = kinds if isinstance(kinds, list) else [kinds]
        return self._rule(" | ".join(self._kind(str(kind), schema) for kind in several))

    def _document(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps({'x-guidance': self._settings, **schema})}")

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = f"{self._name}r{len(self._references)}"
            self._references[reference] = name  # first, because a schema may refer to itself
            self._rules.append(f"{name}: {self._value(resolved(self._root, reference))}")
        return self._references[reference]

    def _kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind in ("integer", "number"):
            kept = {name: schema[name] for name in _NUMBERS if name in schema}
            return self._document({"type": kind, **kept})
        if kind in ("boolean", "null"):
            return self._choice([True, False] if kind == "boolean" else [None])
        makers = {"string": self._string, "array": self._array, "object": self._object}
        return self._rule(makers[kind](schema)) if kind in makers else self._anything()

    def _array(self, schema: Mapping[str, Any]) -> str:
        element = self._value(schema.get("items"))
        min_items, max_items = _bounds(schema, "minItems", "maxItems")
        if max_items == 0:
            return '"[]"'
        more = max(min_items - 1, 0)
        end = "" if max_items is None else str(max(max_items - 1, more))
        elements = f"{element} ({self._comma} {element}){{{more},{end}}}"
        return f'"[" ({elements}){"" if min_items else "?"} "]"'

    def _string(self, schema: Mapping[str, Any]) -> str:
        if not self._braces:
            kept = {name: schema[name] for name in _STRINGS if name in schema}
            document = self._document({"type": "string", **kept})
            single = r"""/'([^'\\]|\\[\\'"nrt])+'/"""  # as models write it too
            return f"{document} | {self._rule(single)}" if self._python and not kept else document
        mark, escaped = self._written(self._form.quote), escaped_text(self._form.quote)
        text = rf"/(.|\n){length_bounds(schema)}"
        if not mark.startswith("<["):
            return f"{mark} {self._rule(f'{text}{escaped}/', '[lazy]')}"
        name = f"{self._name}T{len(self._rules)}".upper()
        self._rules.append(f"{name}: {text}/ & ~/(.|\\n)*{escaped}(.|\\n)*/")
        return f"{mark} {name} {mark}"

    def _choice(self, values: Sequence[Any]) -> str:
        return self._rule(" | ".join(map(self._literal, values)))

    def _literal(self, value: Any) -> str:
        lark = self._written(written_value(self._form, value))
        if self._python and isinstance(value, str) and _UNESCAPED.fullmatch(value):
            single = json.dumps(f"'{value}'", ensure_ascii=False)  # as models write it too
            return f"({lark} | {single})"
        return lark

    def _anything(self) -> str:
        if not self._any:
            self._any = f"{self._name}any"
            kinds = [self._kind(kind, {}) for kind in ("string", "number", "boolean", "null")]
            kinds += [self._kind("array", {}), self._kind("object", {})]
            self._rules.append(f"{self._any}: {' | '.join(kinds)}")
        return self._any


def escaped_text(text: str) -> str:
    """Escape a text for a regular expression in Lark."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def length_bounds(schema: Mapping[str, Any]) -> str:
    """Return the repetition that a string's schema allows."""
    min_length, max_length = _bounds(schema, "minLength", "maxLength")
    return f"{{{min_length},{'' if max_length is None else max_length}}}"


def _bounds(schema: Mapping[str, Any], *names: str) -> tuple[int, int | None]:
    """Return the minimum and the maximum count of a schema; (0, None) if one is too large."""
    min_count, max_count = (
        value if isinstance(value := schema.get(name), int) and value >= 0 else None
        for name in names
    )
    return (
        (0, None)
        if max(min_count or 0, max_count or 0) > _MAX_REPEAT
        else (min_count or 0, max_count)
    )
