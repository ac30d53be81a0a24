"""Schemas, functions and constraints of the tests of grammars."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Constraint
from paceline.drafters import create

STOPS = (0, 2)
COLUMNS = 328
"""More than the tokenizer has tokens, as models often compute."""

Make = Callable[[], Constraint]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["the rider", "the other"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "const": {"const": {"what is forced": "is all of it", "and": [1, 2.5, None, True]}},
    "choice": {"anyOf": [{"const": "this one"}, {"const": "this other"}, {"type": "null"}]},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{3}$"},
    "references": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": {"type": "boolean"}, "next": {"$ref": "#/$defs/end"}},
                "required": ["value", "next"],
                "additionalProperties": False,
            },
            "end": {"type": "null"},
        },
    },
}
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {
        "name": "weather_at",
        "parameters": {
            "type": "object",
            "properties": {"hour": {"$ref": "#/$defs/hour"}},
            "required": ["hour"],
            "additionalProperties": False,
            "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
        },
    },
    {"name": "now"},
]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "here"}}\n</tool_call>'
AT = '<tool_call>\n{"name": "weather_at", "arguments": {"hour": 21}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Unforced:
    """A constraint that forces nothing: every token is picked under its mask."""

    def __init__(self, inner: Constraint) -> None:
        self.masked, self.push = inner.masked, inner.push

    def forced(self, limit: int) -> Sequence[int]:
        return ()

    def allowed_length(self, tokens: Sequence[int]) -> int:
        return len(tokens)


def settings_for(
    constraint: Constraint, sampling: Sampling, drafter: str = "none", block: int = 8
) -> dict[str, Any]:
    return {
        "constraint": constraint,
        "sampling": sampling,
        "stopping": Stopping(stop_token_ids=frozenset(STOPS)),
        "drafters": create(drafter),
        "policy": Fixed(block),
    }


def allowed(constraint: Constraint, columns: int = COLUMNS) -> set[int]:
    return set(np.flatnonzero(np.isfinite(constraint.masked(np.zeros(columns, np.float32)))))


def follows(constraint: Constraint, tokens: Sequence[int]) -> int:
    """Return the number of leading tokens that are allowed, plus one if the text may end there."""
    for place, token in enumerate(tokens):
        if token not in allowed(constraint):
            return place
        constraint.push(token)
    return len(tokens) + (set(STOPS) <= allowed(constraint))


Takes = Callable[[Constraint, str], bool]
