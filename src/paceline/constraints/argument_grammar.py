"""Grammar of values from their JSON schema, in llguidance's Lark.

It is for arguments that are no JSON, and for JSON with integers that llguidance would change. Kept
are constants, types, arrays, objects, alternatives, references and the bounds of numbers and
lengths; other keywords are ignored, so that an argument may be wider than its schema, or rejected
if it is `strict`. One thing is narrower: an object has the properties that are named, if there are
any. Invariant: `call_values.py` reads what a grammar here allows.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.constraints.call_form import Syntax, ToolForm
from paceline.constraints.call_tags import CDATA
from paceline.constraints.call_values import brace_key, writable_key, written_value
from paceline.constraints.schemas import KEYWORDS, has_inexact_constants, resolved
from paceline.errors import InvalidRequest

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRINGS = ("minLength", "maxLength", "pattern", "format")
_DEFINITIONS = ("$defs", "definitions")
_EMPTY = '""'
_UNESCAPED = re.compile(r"[^'\"\\\n]+")
_TOKEN = re.compile(r"<\[[0-9]+\]>")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_MAX_REPEAT = 2000
"""Larger bounds of lengths are ignored: their automata are slow to make."""


class ArgumentGrammar:
    """Makes the rules for one function's arguments."""

    def __init__(
        self,
        form: ToolForm,
        name: str,
        schema: Mapping[str, Any],
        *,
        written: Callable[[str], str],
        settings: Mapping[str, Any],
        strict: bool = False,
    ) -> None:
        """Prepare.

        Args:
            form: how arguments are written.
            name: beginning of the names of all rules.
            schema: of the arguments.
            written: text -> Lark, with the model's own tokens for marks in it.
            settings: llguidance's, for the JSON in arguments.
            strict: reject keywords that would be ignored.
        """
        self._form = form
        self._name = name
        self._root = schema
        self._written = written
        self._settings = settings
        self._strict = strict
        self._python = form.syntax is Syntax.PYTHON
        self._json = form.syntax in (Syntax.JSON, Syntax.TAGS)
        self._has_inexact = has_inexact_constants(schema)
        self._tags = form.tags
        self._close = "" if form.tags is None else written(form.tags.close + form.tags.after)
        self._rules: list[str] = []
        self._references: dict[str, str] = {}
        self._any = ""

    def lines(self) -> list[str]:
        """The rules; the one called `name` is the arguments, with the braces around them.

        Raises InvalidRequest if a parameter's name cannot be written, or a keyword beside an
        inexact constant cannot be followed.
        """
        form, root = self._form, self._root
        for key in _mapping(root.get("properties")):
            if not writable_key(form, key):
                raise InvalidRequest(
                    f"the parameter {key!r} cannot be written in this model's form of calls; "
                    "expected letters, digits and underscores"
                )
        if form.tags is not None:
            body = self._members(root, self._tagged, self._free_tagged(), "")
        elif self._python:
            free = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {self._anything()}'
            body = self._members(root, self._keyword, free, ", ")
        else:
            body = self._value(root) if self._json else self._object(root)
        return [f"{self._name}: {body}", *self._rules]

    def _rule(self, body: str, option: str = "") -> str:
        name = f"{self._name}x{len(self._rules)}"
        self._rules.append(f"{name}{option}: {body}")
        return name

    def _members(
        self,
        schema: Mapping[str, Any],
        member: Callable[[str, Any], str],
        free: str,
        separator: str,
    ) -> str:
        """The members of an object in the schema's order; of an open one, any."""
        properties = _mapping(schema.get("properties"))
        between = json.dumps(separator)
        if not properties:
            closed = schema.get("additionalProperties") is False
            return _EMPTY if closed else f"({free} ({between} {free})*)?"
        required = schema.get("required")
        needed = set(map(str, required)) if isinstance(required, list) else set()
        # From the last property on, first is what may begin, rest what may follow a member:
        #     b, optional   first  b | ""            rest  ", " b | ""
        #     a, required   first  a (rest of b)     rest  ", " a (rest of b)
        rest = first = _EMPTY
        for key, value in reversed(list(properties.items())):
            member_rule = self._rule(member(key, value))
            begun, begins = f"{between} {member_rule} {rest}", f"{member_rule} {rest}"
            optional = key not in needed
            first = self._rule(f"{begins} | {first}" if optional else begins)
            rest = self._rule(f"{begun} | {rest}" if optional else begun)
        return first

    def _tagged(self, key: str, schema: Any) -> str:
        schema = _mapping(schema)
        reference = schema.get("$ref")
        known = isinstance(reference, str)
        target = _mapping(resolved(self._root, str(reference))) if known else schema
        if target.get("type") == "string" and not {"enum", "const"} & target.keys():
            return self._tagged_text(self._head(key, is_text=True), target)
        values = target.get("enum", [target["const"]] if "const" in target else None)
        if isinstance(values, list) and values:
            heads = (self._head(key, is_text=isinstance(value, str)) for value in values)
            texts = (
                f"{head} {self._written(written_value(self._form, value)) or _EMPTY}"
                for head, value in zip(heads, values, strict=True)
            )
            return f"({' | '.join(texts)}) {self._close}"
        kinds = target.get("type")
        if isinstance(kinds, list) and "string" in kinds:
            return self._tagged_text(self._head(key, is_text=True), {})
        return f"{self._head(key, is_text=False)} {self._value(schema)} {self._close}"

    def _free_tagged(self) -> str:
        """Any argument, as a text; only needed if no properties are named."""
        if self._tags is None or self._root.get("properties"):
            return ""
        names = f"/[^{escaped_text(self._tags.middle[0])}\\n]+/"
        middle = self._written(self._tags.head(is_text=True))
        return self._tagged_text(f"{self._written(self._tags.open)} {names} {middle}", {})

    def _head(self, key: str, *, is_text: bool) -> str:
        assert self._tags is not None
        return self._written(f"{self._tags.open}{key}{self._tags.head(is_text=is_text)}")

    def _tagged_text(self, head: str, schema: Mapping[str, Any]) -> str:
        """What comes before a text, the text, and its tag; texts like the tag are left out."""
        tags = self._tags
        assert tags is not None
        bounds = _bounds(schema)
        text = rf"(.|\n){bounds}"
        if not tags.cdata:
            return f"{head} {self._text_before(tags.close, text)}"
        marked = self._text_before(f"]]>{tags.close}", text)
        plain = f"/[^<&\\n]{bounds}/ {self._close}"
        return f"{head} ({plain} | {json.dumps(CDATA)} {marked})"

    def _text_before(self, close: str, text: str) -> str:
        """A rule for what the regular expression `text` matches, and the tag after it."""
        assert self._tags is not None
        letters = escaped_text(close.strip())
        prefix, rest = cut_at_token(self._written(close + self._tags.after))
        if rest:  # a token, which no text has
            name = f"{self._name}T{len(self._rules)}".upper()
            self._rules.append(
                f"{name}: /{text}{escaped_text(prefix)}/ & ~/(.|\\n)*{letters}(.|\\n)*/"
            )
            return f"{name} {rest}"
        end = escaped_text((self._form.end or self._form.close).strip())
        follows = f"({escaped_text(self._tags.open)}|{end})"
        bad = rf"/(.|\n)*{letters}\s*{follows}(.|\n)*/"
        return self._rule(rf"/{text}{escaped_text(close + self._tags.after)}/ & ~{bad}", "[lazy]")

    def _keyword(self, key: str, schema: Any) -> str:
        return f"{json.dumps(key + '=')} {self._value(schema)}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        if self._python or self._json:
            free = f'%json {{"type": "string"}} ": " {self._anything()}'
            inside = self._members(schema, self._quoted_member, free, ", ")
        else:
            free = f'/[A-Za-z0-9_.\\-]+/ ":" {self._anything()}'
            inside = self._members(schema, self._brace_member, free, ",")
        return f'"{{" {inside} "}}"'

    def _quoted_member(self, key: str, schema: Any) -> str:
        return f"{self._literal(key)} {json.dumps(': ')} {self._value(schema)}"

    def _brace_member(self, key: str, schema: Any) -> str:
        return f"{self._written(brace_key(self._form, key) + ':')} {self._value(schema)}"

    def _value(self, schema: Any) -> str:
        """A rule for a value."""
        if not isinstance(schema, Mapping):
            return self._anything()
        if self._json and not self._is_inexact(schema):
            defined = {name: self._root[name] for name in _DEFINITIONS if name in self._root}
            return self._document({**defined, **schema})
        if self._strict:
            self._check(schema)
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
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

    def _is_inexact(self, schema: Mapping[str, Any]) -> bool:
        return self._has_inexact and (
            '"$ref"' in json.dumps(schema) or has_inexact_constants(schema)
        )

    def _check(self, schema: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for a keyword that is ignored where JSON is taken apart."""
        kinds = [name for name in ("$ref", "enum", "const", "anyOf") if name in schema]
        known = {*kinds[:1], *(["type"] if kinds[:1] in (["enum"], ["const"]) else [])}
        if not kinds:
            known = {"type", "properties", "required", "items", "minItems", "maxItems"}
            known |= {"additionalProperties"} if schema.get("properties") else set()
        unknown = sorted((schema.keys() & KEYWORDS) - known)
        named = _mapping(schema.get("properties"))
        if unknown or any(name not in named for name in schema.get("required", ())):
            raise InvalidRequest(
                f"an integer beyond 2^53 cannot be beside {(unknown or ['required'])[0]!r} in "
                f"{json.dumps(schema)[:200]}"
            )

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = f"{self._name}r{len(self._references)}"
            self._references[reference] = name  # first, because a schema may refer to itself
            self._rules.append(f"{name}: {self._value(resolved(self._root, reference))}")
        return self._references[reference]

    def _kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        """A rule for a value of one JSON type."""
        if kind in ("integer", "number"):
            kept = {name: schema[name] for name in _NUMBERS if name in schema}
            return self._document({"type": kind, **kept})
        if kind in ("boolean", "null"):
            return self._choice([True, False] if kind == "boolean" else [None])
        makers = {"string": self._string, "array": self._array, "object": self._object}
        return self._rule(makers[kind](schema)) if kind in makers else self._anything()

    def _array(self, schema: Mapping[str, Any]) -> str:
        element = self._value(schema.get("items"))
        least, most = _whole(schema.get("minItems")) or 0, _whole(schema.get("maxItems"))
        if most == 0:
            return '"[]"'
        more = max(least - 1, 0)
        end = "" if most is None else str(max(most - 1, more))
        comma = json.dumps("," if self._form.syntax is Syntax.BRACES else ", ")
        elements = f"{element} ({comma} {element}){{{more},{end}}}"
        return f'"[" ({elements}){"" if least else "?"} "]"'

    def _string(self, schema: Mapping[str, Any]) -> str:
        if self._python or self._json:
            kept = {name: schema[name] for name in _STRINGS if name in schema}
            document = self._document({"type": "string", **kept})
            single = r"""/'([^'\\]|\\[\\'"nrt])+'/"""  # as models write it too
            return f"{document} | {self._rule(single)}" if self._python and not kept else document
        mark, escaped = self._written(self._form.quote), escaped_text(self._form.quote)
        text = rf"/(.|\n){_bounds(schema)}"
        if not mark.startswith("<["):
            return f"{mark} {self._rule(f'{text}{escaped}/', '[lazy]')}"
        name = f"{self._name}T{len(self._rules)}".upper()
        self._rules.append(f"{name}: {text}/ & ~/(.|\\n)*{escaped}(.|\\n)*/")
        return f"{mark} {name} {mark}"

    def _choice(self, values: Sequence[Any]) -> str:
        return self._rule(" | ".join(map(self._literal, values)))

    def _literal(self, value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        text = text if self._json else written_value(self._form, value)
        lark = self._written(text) if text else _EMPTY
        if self._python and isinstance(value, str) and _UNESCAPED.fullmatch(value):
            single = json.dumps(f"'{value}'", ensure_ascii=False)  # as models write it too
            return f"({lark} | {single})"
        return lark

    def _anything(self) -> str:
        """A rule for a value of any type."""
        if self._json:
            return self._document({})
        if not self._any:
            self._any = f"{self._name}any"
            kinds = [self._kind(kind, {}) for kind in ("string", "number", "boolean", "null")]
            kinds += [self._kind("array", {}), self._kind("object", {})]
            self._rules.append(f"{self._any}: {' | '.join(kinds)}")
        return self._any


def cut_at_token(lark: str) -> tuple[str, str]:
    """The letters before the first token in quoted texts and tokens, and the rest; "" without one.

    A text goes as far as it can, so that it has to match the letters before a token as well.
    """
    token = _TOKEN.search(lark)
    if token is None:
        return "", ""
    letters = _QUOTED.findall(lark[: token.start()])
    return "".join(map(json.loads, letters)), lark[token.start() :]


def escaped_text(text: str) -> str:
    """A text for a regular expression of Lark."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _bounds(schema: Mapping[str, Any]) -> str:
    """The repetition that a string's schema allows."""
    least, most = _whole(schema.get("minLength")) or 0, _whole(schema.get("maxLength"))
    if least > _MAX_REPEAT or (most is not None and most > _MAX_REPEAT):
        return "*"
    return "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
