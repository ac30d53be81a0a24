"""Functions, their calls, and reading those back."""

import json
from typing import Any

from paceline.tools.calls import CallPiece, CallStream, Parsed, ToolCall, parse_tool_calls
from paceline.tools.forms import ToolForm

SCHEMAS: dict[str, dict[str, Any]] = {
    "trip": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "hour": {"$ref": "#/$defs/hour"},
            "by": {"enum": ["train", 'the "bus"', 3, None]},
            "stops": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
            "seats": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
                "required": ["b"],
                "additionalProperties": False,
            },
        },
        "required": ["hour", "by"],
        "additionalProperties": False,
        "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TRIP = ToolCall("trip", '{"city": "Linz", "hour": 7, "by": "train", "stops": ["a", "b"]}')
NOW = ToolCall("now", "{}")


def read(text: str, form: ToolForm, functions: dict[str, Any] = SCHEMAS) -> Parsed:
    """The calls of a whole text, with their arguments as `json.dumps` writes them."""
    return tidy(parse_tool_calls(text, form, functions))


def tidy(result: Parsed) -> Parsed:
    calls = (ToolCall(call.name, json.dumps(json.loads(call.arguments))) for call in result.calls)
    return Parsed(result.content, tuple(calls))


def same(call: ToolCall) -> ToolCall:
    return ToolCall(call.name, json.dumps(json.loads(call.arguments)))


def streamed(pieces: list[str], form: ToolForm, functions: dict[str, Any]) -> Parsed:
    """The calls of a text that comes in pieces."""
    stream = CallStream(form, functions)
    content, names, arguments = "", dict[int, str](), dict[int, str]()
    parts = [part for piece in pieces for part in stream.push(piece)] + stream.finish()
    for part in parts:
        if isinstance(part, CallPiece):
            assert bool(part.name) is (part.call not in names)
            names.setdefault(part.call, part.name)
            arguments[part.call] = arguments.get(part.call, "") + part.arguments
        else:
            content += part
    return Parsed(content, tuple(ToolCall(names[call], arguments[call]) for call in names))
