"""What a schema asks that llguidance would change or reject: left out or named."""

import logging
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints.grammar import Grammars, _log
from paceline.constraints.tool_calls import ToolCall, written_calls
from paceline.constraints.tool_forms import FORMS, HERMES
from paceline.errors import InvalidRequest
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
def test_large_integers_hold_or_are_named_and_left_out_for_functions(
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
    "anyOf": [
        {"type": "number"},
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    ]
}
"""pydantic's Decimal."""

NOT_FOLLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "look-around": ({"type": "string", "pattern": "^(?=.*a)b"}, "properties.p.pattern"),
    "decimal": (PRICE, "properties.p.anyOf[1].pattern"),
    "most int64": ({"type": "integer", "maximum": 2**63 - 1}, "properties.p.maximum"),
    "names": ({"type": "object", "patternProperties": {"^(?!x)": {}}}, "p.patternProperties"),
    "draft": ({"$schema": "https://example.com/mine", "type": "string"}, "properties.p.$schema"),
    "required": ({"type": "object", "properties": {}, "required": None}, "properties.p.required"),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_cannot_be_followed_is_named_in_a_schema_and_left_out_for_a_function(
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


@pytest.mark.parametrize(
    "draft",
    ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"],
)
def test_the_name_of_a_known_draft_is_no_fault(draft: str, grammars: Grammars, takes: Takes):
    assert takes(grammars.json_schema({"$schema": draft, "type": "boolean"}), "true")


@pytest.mark.parametrize("schema", [{}, {"title": "a", "default": 10**400}])
def test_a_schema_that_says_nothing_allows_any_json_and_no_number_without_end(
    schema: dict[str, Any], grammars: Grammars, takes: Takes
):
    for text in ('"a"', "[1.5, {}]", '{"a": null}', "-12", "true"):
        assert takes(grammars.json_schema(schema), text), text
    assert not takes(grammars.json_schema(schema), "1" * 17)


@pytest.mark.parametrize("inner", [{"const": 2**60}, {"pattern": "(?=a)"}])
def test_a_schema_that_is_nested_deeply_is_followed_or_refused(
    inner: dict[str, Any], grammars: Grammars
):
    for depth in (100, 450):
        schema = inner
        for _ in range(depth):
            schema = {"items": schema, "type": "array"}
        with suppress(InvalidRequest):
            grammars.json_schema(schema)
