"""What a schema asks that llguidance would change or reject: written exactly, left out or named."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints.grammar import Grammars, _log
from paceline.constraints.tool_calls import ToolCall, written_calls
from paceline.constraints.tool_forms import FORMS, HERMES, ToolForm
from paceline.errors import InvalidRequest
from support.errors import raises
from support.grammars import Takes

pytest.importorskip("llguidance")

SYNTAXES = [HERMES, FORMS["qwen-xml"], FORMS["lfm2"], FORMS["gemma"]]
"""One of each syntax."""

EDGES = [10**20, 2**53, 2**63, 10**30]
LARGE = st.builds(
    lambda edge, offset, sign: sign * (edge + offset),
    st.sampled_from(EDGES),
    st.integers(-2, 2),
    st.sampled_from([-1, 1]),
)


def wrapped(constant: dict[str, Any]) -> list[tuple[dict[str, Any], Callable[[int], str]]]:
    """Schemas with a constant in them, and the JSON that has a number there."""
    closed = {"type": "object", "additionalProperties": False, "required": ["a"]}
    inside = {**closed, "properties": {"a": constant, "b": {"type": "string", "maxLength": 2}}}
    return [
        (constant, str),
        (inside, lambda n: f'{{"a": {n}, "b": "x"}}'),
        ({"type": "array", "items": {"anyOf": [constant, {"type": "null"}]}}, lambda n: f"[{n}]"),
        ({"$ref": "#/$defs/c", "$defs": {"c": inside}}, lambda n: f'{{"a": {n}}}'),
    ]


@settings(max_examples=10)
@given(value=LARGE, offset=st.sampled_from([-1, 1]), form=st.sampled_from(SYNTAXES))
def test_large_integers_keep_their_digits(
    value: int, offset: int, form: ToolForm, grammars: Grammars, takes: Takes
):
    for schema, text in [*wrapped({"const": value}), *wrapped({"enum": ["x", value]})]:
        defined = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        functions = [{"name": "f", "parameters": {"properties": {"p": schema}, **defined}}]
        for number, fits in ((value, True), (value + offset, False)):
            assert takes(grammars.json_schema({**schema, **defined}), text(number)) is fits
            call = written_calls(form, [ToolCall("f", f'{{"p": {text(number)}}}')])
            assert takes(grammars.tools(functions, "f", form=form), call) is fits


@settings(max_examples=25)
@given(bound=LARGE, keyword=st.sampled_from(["minimum", "maximum", "exclusiveMinimum"]))
def test_large_bounds_hold_or_are_named_and_left_out_for_functions(
    bound: int, keyword: str, grammars: Grammars, takes: Takes
):
    schema = {"properties": {"p": {"type": "integer", keyword: bound}}, "type": "object"}
    sign = -1 if keyword == "maximum" else 1
    if abs(bound) <= 2**53:
        constraint = grammars.json_schema(schema)
        assert takes(constraint, f'{{"p": {bound + sign}}}')
        assert not takes(grammars.json_schema(schema), f'{{"p": {bound - sign}}}')
        return
    with raises(InvalidRequest, str(bound)):
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


def test_a_large_constant_beside_what_is_not_written_exactly_is_refused(grammars: Grammars):
    schema = {"allOf": [{"const": 2**60}, {"type": "integer"}]}
    with raises(InvalidRequest, str(2**60)):
        grammars.json_schema(schema)


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
