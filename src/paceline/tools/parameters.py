"""Looks up a function's parameters in JSON schemas.

Schemas come from users, so they may contain anything: a part of the wrong type counts as missing.
"""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_MAX_DEPTH = 64


def mapping(value: Any) -> Schema:
    """Return an object, or an empty one in place of other values."""
    return value if isinstance(value, Mapping) else {}


def constants(schema: Schema) -> list[Any]:
    """Return the values that a schema lists, if any."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else []


def resolved(root: Schema, reference: str) -> Any:
    """Return the schema at a reference such as "#/$defs/city", or None if it is missing."""
    target: Any = root
    if not reference.startswith("#"):
        return None
    for step in filter(None, reference[1:].split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def json_types(schema: Any, root: Schema, depth: int = 0) -> set[str]:
    """Return the JSON types that a parameter may have; an empty set if its schema has none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    if "type" in schema:
        named = schema["type"]
        return {str(kind) for kind in (named if isinstance(named, list) else [named])}
    if values := constants(schema):
        return {json_type(value) for value in values}
    if isinstance(reference := schema.get("$ref"), str):
        return json_types(resolved(root, reference), root, depth + 1)
    types: set[str] = set()
    for name in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(name)
        for alternative in listed if isinstance(listed, list) else ():
            kinds = json_types(alternative, root, depth + 1)
            if not kinds and name != "allOf":
                return set()
            types |= kinds
    return types


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")
