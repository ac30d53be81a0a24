"""Grammars of tool calls in every format: written calls are allowed, allowed calls are parsed."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints.grammar import Grammars
from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.sampling import Sampling
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.models import Tokenizer
from paceline.tools.calls import ToolCall, written_calls
from paceline.tools.forms import FORMS, HERMES, ToolForm
from support.driver import Answer, answer
from support.errors import raises
from support.grammars import Takes, Unforced, settings_for
from support.tool_calls import NOW, SCHEMAS, TRIP, parse_tool_calls, read, same

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

GEMMA, HARMONY, LFM2, QWEN_XML = (FORMS[name] for name in ("gemma", "harmony", "lfm2", "qwen-xml"))

TEXT_FORMS = [form for form in FORMS.values() if not form.channels]
"""Forms whose marks may be text; harmony's are tokens."""
each_syntax = pytest.mark.parametrize(
    "form", [HERMES, QWEN_XML, LFM2, GEMMA, HARMONY], ids=lambda form: form.name
)

THOUGHTS = ReasoningMarks(("<think>",), ("</think>",), {})
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
NESTED = ToolCall("trip", '{"hour": 0, "by": "the \\"bus\\"", "seats": {"a": true, "b": null}}')


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_a_written_tool_call_is_allowed_and_parsed(
    form: ToolForm, grammars: Grammars, takes: Takes
):
    for call, other in ((NESTED, "now"), (NOW, "trip")):
        text = written_calls(form, [call])
        assert read(text, form) == ("", (same(call),))
        for choice in ("auto", call.name):
            assert takes(grammars.tools(FUNCTIONS, choice, form=form), text), choice
        assert not takes(grammars.tools(FUNCTIONS, other, form=form), text)


@pytest.mark.parametrize("form", TEXT_FORMS, ids=lambda form: form.name)
def test_parallel_tool_calls_are_allowed_if_the_format_supports_them(
    form: ToolForm, grammars: Grammars, takes: Takes
):
    text = written_calls(form, [TRIP, NOW])
    for choice in ("auto", "required"):
        fits = takes(grammars.tools(FUNCTIONS, choice, form=form), text)
        assert fits is not form.single
        assert not takes(grammars.tools(FUNCTIONS, choice, form=form, parallel=False), text)
    if not form.single:
        assert read(text, form) == ("", (same(TRIP), NOW))


@each_syntax
def test_invalid_tool_arguments_are_not_allowed(form: ToolForm, grammars: Grammars, takes: Takes):
    for bad in ('{"hour": 24, "by": 3}', '{"by": 3}', '{"hour": 1, "by": 4}'):
        text = written_calls(form, [ToolCall("trip", bad)])
        assert not takes(grammars.tools(FUNCTIONS, "required", form=form), text)


@pytest.mark.parametrize("form", TEXT_FORMS, ids=lambda form: form.name)
def test_text_and_tool_calls_are_distinguished(form: ToolForm, grammars: Grammars, takes: Takes):
    text = "Let me see: {[<|( and more"
    assert takes(grammars.tools(FUNCTIONS, form=form), text)
    assert not takes(grammars.tools(FUNCTIONS, "required", form=form), text)
    assert read(text, form) == (text, ())
    if not form.bare:
        both = f"{text}\n{written_calls(form, [NOW])}"
        assert takes(grammars.tools(FUNCTIONS, form=form), both)
        assert read(both, form) == (text, (NOW,))


@each_syntax
def test_forced_tool_calls_are_valid_and_the_same_with_every_drafter(
    form: ToolForm, grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    def decoded(drafter: str, *, forced: bool = True) -> Answer:
        constraint = grammars.tools(FUNCTIONS, "required", form=form, parallel=False)
        inner = constraint if forced else Unforced(constraint)
        sampling = Sampling(temperature=1.5, seed=0)
        return answer(engine, [7, 8], **settings_for(inner, sampling, drafter))

    plain = decoded("none", forced=False)
    content, (call,) = parse_tool_calls(tokenizer.decode(plain.tokens), form, SCHEMAS)
    assert (content, plain.finish_reason) == ("", "stop")
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert decoded("none") == decoded("suffix") == plain


@each_syntax
def test_reasoning_may_precede_a_forced_tool_call(form: ToolForm, grammars: Grammars, takes: Takes):
    call = written_calls(form, [NOW])

    def fits(text: str, marks: ReasoningMarks) -> bool:
        return takes(grammars.tools(FUNCTIONS, "required", form=form, thoughts=marks), text)

    assert fits(call, THOUGHTS)
    assert fits(f"<think>\nhm <tool_call> [\n</think>\n\n{call}", THOUGHTS)
    assert fits(f"hm\n</think>\n\n{call}", replace(THOUGHTS, inside=True))
    assert not fits(call, replace(THOUGHTS, inside=True))
    assert not fits(f"<think>hm</think>no {call}", THOUGHTS)


WORDS = ("type", "properties", "required", "items", "enum", "const", "anyOf", "$ref", "$defs")
WORDS += ("minLength", "maxLength", "minItems", "maxItems", "additionalProperties", "minimum", "a")
ANY = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 10**20),
        st.sampled_from(
            ["string", "object", "array", "integer", "#", "#/$defs/a", "#/x", "", "a b"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(
    parameters=st.dictionaries(st.sampled_from(WORDS), ANY, max_size=5),
    form=st.sampled_from([*FORMS.values()]),
)
def test_any_parameters_are_compiled_or_rejected(
    parameters: dict[str, Any], form: ToolForm, grammars: Grammars
):
    with suppress(InvalidRequest):
        grammars.tools([{"name": "f", "parameters": parameters}], form=form)
    text = written_calls(form, [ToolCall("f", '{"a": "1"}')])
    assert read(text, form, {"f": parameters}).calls[0].name == "f"


def test_a_name_or_key_that_a_format_cannot_express_is_rejected(grammars: Grammars):
    with raises(InvalidRequest, "'a b'"):
        grammars.tools([{"name": "a b"}], form=GEMMA)
    parameters = {"properties": {"a b": {}}}
    with raises(InvalidRequest, "'a b'"):
        grammars.tools([{"name": "f", "parameters": parameters}], form=LFM2)
