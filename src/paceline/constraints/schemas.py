"""Parts of JSON schemas that cannot be followed, found and left out.

llguidance computes with floats of 64 bits, so that an integer beyond 2^53 becomes another.
Invariant: without its parts a schema allows at least as much as with them.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MAX_EXACT = 2**53
"""Up to here every integer is a float of 64 bits."""

_NAMES = (
    "$ref additionalItems additionalProperties allOf anyOf const contains dependentRequired "
    "dependentSchemas else enum exclusiveMaximum exclusiveMinimum format if items maxItems "
    "maxLength maxProperties maximum minItems minLength minProperties minimum multipleOf not oneOf "
    "pattern patternProperties prefixItems properties propertyNames required then type "
    "unevaluatedItems unevaluatedProperties uniqueItems"
)
KEYWORDS = frozenset(_NAMES.split())
"""Keywords that decide whether a value is valid."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
SCALARS = (*_BOUNDS, *_COUNTS, "multipleOf", "pattern", "format")
"""Keywords whose value is one number or text, with the same meaning in every schema."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_NESTED = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems")
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")


class SchemaPart(NamedTuple):
    path: str
    """`properties.age.maximum`."""
    value: Any

    def __str__(self) -> str:
        text = json.dumps(self.value, ensure_ascii=False, default=str)
        return f"{self.path[-100:]}: {text if len(text) <= 100 else f'{text[:100]}...'}"


IsPart = Callable[[str, Any], bool]
"""Of a keyword and its value: whether that cannot be followed."""


def never_followed(keyword: str, value: Any) -> bool:
    """Return whether a part is rejected or changed, whatever the rest of the schema."""
    if keyword == "$schema":
        return not isinstance(value, str) or _DRAFT.fullmatch(value) is None
    if value is None:
        return keyword in KEYWORDS and keyword != "const"
    if keyword in _BOUNDS and isinstance(value, int | float):
        return abs(value) > MAX_EXACT
    return keyword in ("enum", "const") and _is_inexact(value)


def left_out(schema: Mapping[str, Any], is_part: IsPart) -> tuple[dict[str, Any], list[SchemaPart]]:
    """Return the schema without its parts, and the parts.

    Defaults, examples and names of known drafts, which allow nothing and forbid nothing, go too.
    """
    parts: list[SchemaPart] = []

    def supported(value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [supported(element, f"{path}[{at}]") for at, element in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        result: dict[str, Any] = {}
        for keyword, inner in value.items():
            where = f"{path}.{keyword}" if path else keyword
            if keyword == "patternProperties" and isinstance(inner, Mapping):
                names = [name for name in inner if is_part("pattern", name)]
                parts.extend(SchemaPart(where, name) for name in names)
                if names:
                    continue
            if keyword in _MAPS and isinstance(inner, Mapping):
                named = {name: schema for name, schema in inner.items() if schema is not None}
                parts.extend(
                    SchemaPart(f"{where}.{name}", None) for name in inner if name not in named
                )
                result[keyword] = {
                    name: supported(s, f"{where}.{name}") for name, s in named.items()
                }
            elif keyword in _NESTED and isinstance(inner, Mapping | list):
                result[keyword] = supported(inner, where)
            elif keyword in _COUNTS and isinstance(inner, float) and inner.is_integer():
                result[keyword] = int(inner)  # 10.0 is an integer, but not for llguidance
            elif is_part(keyword, inner):
                parts.append(SchemaPart(where, inner))
            elif keyword not in ("default", "examples", "$schema"):
                result[keyword] = inner
        if "patternProperties" in value.keys() - result.keys():
            result.pop("additionalProperties", None)  # it would forbid keys that a pattern allowed
        return result

    return supported(schema, ""), parts


def _is_inexact(value: Any) -> bool:
    """Return whether a JSON value has an integer that llguidance would change."""
    if isinstance(value, Mapping | list):
        return any(map(_is_inexact, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, int) and abs(value) > MAX_EXACT


def takes_nothing(schema: Mapping[str, Any]) -> bool:
    """Return whether a function's schema names no parameter and does not ask for free ones."""
    stated = schema.keys() & KEYWORDS - {"type"}
    return not any(schema[name] or name not in ("properties", "required") for name in stated)
