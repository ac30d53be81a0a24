"""Schema keywords that llguidance would change or reject: dropped or reported."""

import json
import logging
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints.grammar import Grammars, _log
from paceline.errors import InvalidRequest
from paceline.tools.calls import ToolCall, written_calls
from paceline.tools.forms import FORMS, HERMES
from support.errors import raises
from support.grammars import Takes

pytest.importorskip("llguidance")

SYNTAXES = [HERMES, FORMS["qwen-xml"], FORMS["lfm2"], FORMS["gemma"]]
"""One of each syntax."""

KEYWORDS = ["const", "enum", "minimum", "maximum", "exclusiveMinimum"]


@settings(max_examples=25)
@given(
    edge=st.sampled_from([10**20, 2**53, 2**63, 10**30]),
    offset=st.integers(-2, 2),
    sign=st.sampled_from([-1, 1]),
    keyword=st.sampled_from(KEYWORDS),
)
def test_large_integers_are_enforced_or_reported_and_dropped_for_tools(
    edge: int, offset: int, sign: int, keyword: str, grammars: Grammars, takes: Takes
):
    number = sign * (edge + offset)
    value = [{"a": number}, number] if keyword == "enum" else number
    schema = {"properties": {"p": {"type": "integer", keyword: value}}, "type": "object"}
    if abs(number) <= 2**53:
        fits = number + {"maximum": -1, "minimum": 1, "exclusiveMinimum": 1}.get(keyword, 0)
        wrong = number + (1 if keyword == "maximum" else -1)
        assert takes(grammars.json_schema(schema), f'{{"p": {fits}}}')
        assert not takes(grammars.json_schema(schema), f'{{"p": {wrong}}}')
        return
    with raises(InvalidRequest, str(number)):
        grammars.json_schema(schema)
    for form in SYNTAXES:
        constraint = grammars.tools([{"name": "f", "parameters": schema}], form=form)
        assert takes(constraint, written_calls(form, [ToolCall("f", '{"p": 5}')]))


PRICE = {
    "anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]
}
"""pydantic's Decimal."""

NOT_FOLLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "look-around": ({"type": "string", "pattern": "^(?=.*a)b"}, "properties.p.pattern"),
    "decimal": (PRICE, "properties.p.anyOf[1].pattern"),
    "most int64": ({"type": "integer", "maximum": 2**63 - 1}, "properties.p.maximum"),
    "names": ({"type": "object", "patternProperties": {"^(?!x)": {}}}, "p.patternProperties"),
    "draft": ({"$schema": "https://example.com/mine", "type": "string"}, "properties.p.$schema"),
    "required": ({"type": "object", "properties": {}, "required": None}, "properties.p.required"),
    "no schema": ({"type": "object", "properties": {"a": None}}, "properties.p.properties.a"),
}
TYPES = {str: "string", list: "array", dict: "object"}
BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
WRONG_COUNTS = (2**64, 1e308, 10.5, -1, "5", None)
WRONG_BOUNDS = (2**64, 1e308, "5", [5], None)
WRONG: list[tuple[str, str, Any]] = [
    *[("string", keyword, value) for keyword in BOUNDS["string"] for value in (2**32, 2**53)],
    *[("number", "multipleOf", value) for value in (0, 2**32)],
    *[
        (kind, keyword, value)
        for kind, keywords in BOUNDS.items()
        for keyword in keywords
        for value in (WRONG_BOUNDS if kind == "number" else WRONG_COUNTS)
    ],
]


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_unsupported_keywords_are_reported_for_schemas_and_dropped_for_tools(
    name: str, grammars: Grammars, takes: Takes, caplog: pytest.LogCaptureFixture
):
    part, path = NOT_FOLLOWED[name]
    held = {"p": part, "q": {"enum": ["yes"]}}
    schema = {"type": "object", "properties": held, "required": ["q"]}
    with raises(InvalidRequest, path):
        grammars.json_schema(schema)
    functions = [{"name": "f", "parameters": schema}, {"name": "now"}]
    for form in SYNTAXES:
        _log.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            constraint = grammars.tools(functions, form=form)
            assert grammars.tools(functions, form=form)
        (line,) = caplog.messages
        assert path in line
        assert takes(constraint, written_calls(form, [ToolCall("f", '{"q": "yes"}')]))
        wrong = written_calls(form, [ToolCall("f", '{"q": "no"}')])
        assert not takes(grammars.tools(functions, form=form), wrong)


@pytest.mark.parametrize(("kind", "keyword", "value"), WRONG)
def test_unsupported_bounds_are_reported_for_schemas_and_dropped_for_tools(
    kind: str, keyword: str, value: Any, grammars: Grammars, takes: Takes
):
    example = {"string": "a", "array": [], "object": {}, "number": 5}[kind]
    schema = {"type": "object", "properties": {"p": {"type": kind, keyword: value}}}
    with raises(InvalidRequest, f"properties.p.{keyword}"):
        grammars.json_schema(schema)
    for form in SYNTAXES:
        constraint = grammars.tools([{"name": "f", "parameters": schema}], form=form)
        call = ToolCall("f", json.dumps({"p": example}))
        assert takes(constraint, written_calls(form, [call]))


def test_an_unreachably_large_bound_is_accepted(grammars: Grammars, takes: Takes):
    for keyword, example in (("maxItems", []), ("maxProperties", {}), ("maxLength", "")):
        schema = {"properties": {"p": {keyword: 2**31, "type": TYPES[type(example)]}}}
        call = ToolCall("f", json.dumps({"p": example}))
        for form in SYNTAXES:
            constraint = grammars.tools([{"name": "f", "parameters": schema}], form=form)
            assert takes(constraint, written_calls(form, [call]))


EMPTY: list[Any] = [
    None,
    {},
    {"type": "object"},
    {"type": "object", "properties": {}, "required": []},
    {"properties": None},
    {"properties": {"a": None}},
    {"a": None, "description": "nothing", "x-guidance": {"whitespace_flexible": True}},
]


@pytest.mark.parametrize("parameters", EMPTY)
def test_a_function_without_parameters_gets_no_arguments(
    parameters: Any, grammars: Grammars, takes: Takes
):
    for form in SYNTAXES:
        for arguments in ("{}", '{"a": 1}'):
            constraint = grammars.tools([{"name": "f", "parameters": parameters}], form=form)
            text = written_calls(form, [ToolCall("f", arguments)])
            assert takes(constraint, text) is (arguments == "{}")


@pytest.mark.parametrize(
    "parameters", [{"additionalProperties": True}, {"minProperties": 1}, {"required": ["a"]}]
)
def test_a_function_with_free_form_arguments_gets_them(
    parameters: dict[str, Any], grammars: Grammars, takes: Takes
):
    constraint = grammars.tools([{"name": "f", "parameters": parameters}])
    assert takes(constraint, written_calls(HERMES, [ToolCall("f", '{"a": 1}')]))


@pytest.mark.parametrize(
    "draft",
    ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"],
)
def test_a_known_json_schema_version_is_accepted(draft: str, grammars: Grammars, takes: Takes):
    assert takes(grammars.json_schema({"$schema": draft, "type": "boolean"}), "true")


@pytest.mark.parametrize("schema", [{}, {"title": "a", "default": 10**400}])
def test_an_empty_schema_allows_any_json_but_no_endless_number(
    schema: dict[str, Any], grammars: Grammars, takes: Takes
):
    for text in ('"a"', "[1.5, {}]", '{"a": null}', "-12", "true"):
        assert takes(grammars.json_schema(schema), text), text
    assert not takes(grammars.json_schema(schema), "1" * 17)


@pytest.mark.parametrize("inner", [{"const": 2**60}, {"pattern": "(?=a)"}])
def test_a_deeply_nested_schema_is_enforced_or_rejected(inner: dict[str, Any], grammars: Grammars):
    for depth in (100, 450):
        schema = inner
        for _ in range(depth):
            schema = {"items": schema, "type": "array"}
        with suppress(InvalidRequest):
            grammars.json_schema(schema)
