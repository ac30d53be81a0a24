"""The texts that schemas, regular expressions, grammars and tools allow."""

import json
from typing import Any

import pytest

from paceline.constraints.grammar import Grammars
from paceline.models import Tokenizer
from support.grammars import AT, FUNCTIONS, NOW, PERSON, STOPS, WEATHER, Takes, allowed
from support.tool_calls import parse_tool_calls

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("{}", True),
        ('{"the": [1, -2.5e3, "é\\n", {"a": null}], "": false}', True),
        ("[]", False),
        ('{"a": 1', False),
        ("{'a': 1}", False),
        ("{}{}", False),
    ],
)
def test_json_mode_allows_only_json_objects(
    text: str, fits: bool, grammars: Grammars, takes: Takes
):
    assert takes(grammars.json_object(), text) is fits


LOOSE = {"properties": {"a": {"items": {"type": "integer"}}}, "type": "object"}


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        (PERSON, '{"name": "a", "kind": "the rider", "age": 3, "tags": []}', True),
        (PERSON, '{"name":"a","kind":"the rider","age":3,"tags":[]}', False),
        (PERSON, '{"name": "a", "kind": "the rider", "age": 131, "tags": []}', False),
        (PERSON, '{"name": "a", "kind": "a rider", "age": 3, "tags": []}', False),
        (PERSON, '{"name": "a", "kind": "the rider", "age": 3}', False),
        ({**LOOSE, "x-guidance": {"whitespace_flexible": True}}, '{\n  "a" : [1,2 ]}', False),
        ({**LOOSE, "x-guidance": {"nothing": 3}}, '{"a": [1, 2]}', True),
        ({"type": "string", "maxLength": 2.0}, '"ab"', True),
        ({"type": "string", "maxLength": 2.0}, '"abc"', False),
        (LOOSE, '{"a": [1, 2]}', True),
        (LOOSE, '{"a":[1,2]}', False),
        ({}, '"anything"', True),
    ],
)
def test_a_schema_determines_the_allowed_text(
    schema: dict[str, Any], text: str, fits: bool, grammars: Grammars, takes: Takes
):
    assert takes(grammars.json_schema(schema), text) is fits


@pytest.mark.parametrize(
    ("text", "fits"), [("ab", True), ("aab", True), ("b", False), ("ab\n", False), ("xab", False)]
)
@pytest.mark.parametrize("expression", ["a+b", "^a+b$"])
def test_a_regular_expression_matches_the_whole_text(
    expression: str, text: str, fits: bool, grammars: Grammars, takes: Takes
):
    assert takes(grammars.regex(expression), text) is fits


def test_a_grammar_may_be_recursive(grammars: Grammars, takes: Takes):
    nested = 'start: "a" start "b" | "c"'
    assert takes(grammars.lark(nested), "aacbb")
    assert not takes(grammars.lark(nested), "aacb")


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        (WEATHER, "auto required weather"),
        (AT, "auto required weather_at"),
        (f"{WEATHER}\n{AT}", "auto required"),
        (f"{WEATHER}\n{WEATHER}", "auto required weather"),
        (NOW, "auto required now"),
        (NOW.replace("{}", '{"a": 1}'), ""),
        (AT.replace("21", "24"), ""),
        (WEATHER.replace('"weather"', '"weather_at"'), ""),
        (WEATHER.replace("}}", "}"), ""),
        ("", "auto"),
        ("Just text, with a < and a <tool_call", "auto"),
        (f"Wait: {WEATHER}\nand {AT} and so on", "auto"),
        (f"Wait: {WEATHER}\nand <tool_call> too", ""),
        (f" {WEATHER}", "auto"),
    ],
)
def test_tool_calls_are_allowed_by_tool_choice(
    text: str, choices: str, grammars: Grammars, takes: Takes
):
    for choice in ("auto", "required", "weather", "weather_at", "now"):
        fits = takes(grammars.tools(FUNCTIONS, choice), text)
        assert fits is (choice in choices.split()), choice


def test_a_required_tool_call_may_be_followed_by_one_final_text_token(
    grammars: Grammars, tokenizer: Tokenizer
):
    """Otherwise a line feed, which most models write there, would have to start another call."""
    constraint = grammars.tools(FUNCTIONS, "required")
    for token in tokenizer.encode(f"{WEATHER}\n"):
        constraint.push(token)
    mark, text = tokenizer.encode("<tool_call>")[0], tokenizer.encode("the")[0]
    assert {mark, text, *STOPS} <= allowed(constraint)
    constraint.push(text)
    assert allowed(constraint) == set(STOPS)


@pytest.mark.parametrize("name", ['a"b', "a\\n", "a b.c/d", "é 漢", "a\nb", "tool'</tool_call>"])
def test_a_function_may_have_any_name(name: str, grammars: Grammars, takes: Takes):
    call = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    text = f"<tool_call>\n{call}\n</tool_call>"
    assert takes(grammars.tools([{"name": name}], "required"), text)
    assert parse_tool_calls(text).calls[0].name == name
