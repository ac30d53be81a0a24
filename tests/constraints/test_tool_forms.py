"""Every form of tool calls: what is written is read, what is allowed is read, however it is cut."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints.grammar import Grammars
from paceline.constraints.tool_calls import (
    Parsed,
    ToolCall,
    parse_tool_calls,
    written_calls,
)
from paceline.constraints.tool_forms import FORMS, HERMES, Syntax, ToolForm
from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.sampling import Sampling
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.models import Tokenizer
from support.driver import Answer, answer
from support.errors import raises
from support.grammars import Takes, Unforced, settings_for, streamed

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

FUNCTION_GEMMA = FORMS["function-gemma"]
GEMMA = FORMS["gemma"]
HARMONY = FORMS["harmony"]
LFM2 = FORMS["lfm2"]
LLAMA = FORMS["llama"]
MISTRAL = FORMS["mistral"]
MISTRAL_ARGS = FORMS["mistral-args"]
QWEN_XML = FORMS["qwen-xml"]

TEXT_FORMS = [form for form in FORMS.values() if not form.channels]
"""Forms whose marks may be text; harmony's are tokens."""
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
each_syntax = pytest.mark.parametrize(
    "form", [HERMES, QWEN_XML, LFM2, GEMMA, HARMONY], ids=lambda form: form.name
)

THOUGHTS = ReasoningMarks(("<think>",), ("</think>",), {})
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
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
TRIP = ToolCall("trip", '{"city": "Linz", "hour": 7, "by": "train", "stops": ["a", "b"]}')
NESTED = ToolCall("trip", '{"hour": 0, "by": "the \\"bus\\"", "seats": {"a": true, "b": null}}')
NOW = ToolCall("now", "{}")


def read(text: str, form: ToolForm, functions: dict[str, Any] = SCHEMAS) -> Parsed:
    """The calls of a whole text, with their arguments as `json.dumps` writes them."""
    return tidy(parse_tool_calls(text, form, functions))


def tidy(result: Parsed) -> Parsed:
    calls = (ToolCall(call.name, json.dumps(json.loads(call.arguments))) for call in result.calls)
    return Parsed(result.content, tuple(calls))


def same(call: ToolCall) -> ToolCall:
    return ToolCall(call.name, json.dumps(json.loads(call.arguments)))


@every_form
def test_a_written_tool_call_is_allowed_and_read_back(
    form: ToolForm, grammars: Grammars, takes: Takes
):
    for call, other in ((NESTED, "now"), (NOW, "trip")):
        text = written_calls(form, [call])
        assert read(text, form) == ("", (same(call),))
        for choice in ("auto", call.name):
            assert takes(grammars.tools(FUNCTIONS, choice, form=form), text), choice
        assert not takes(grammars.tools(FUNCTIONS, other, form=form), text)


@pytest.mark.parametrize("form", TEXT_FORMS, ids=lambda form: form.name)
def test_parallel_tool_calls_are_allowed_where_the_form_has_them(
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
def test_arguments_that_do_not_match_are_not_allowed(
    form: ToolForm, grammars: Grammars, takes: Takes
):
    for bad in ('{"hour": 24, "by": 3}', '{"by": 3}', '{"hour": 1, "by": 4}'):
        text = written_calls(form, [ToolCall("trip", bad)])
        assert not takes(grammars.tools(FUNCTIONS, "required", form=form), text)


@pytest.mark.parametrize("form", TEXT_FORMS, ids=lambda form: form.name)
def test_text_and_tool_calls_are_told_apart(form: ToolForm, grammars: Grammars, takes: Takes):
    text = "Let me see: {[<|( and more"
    assert takes(grammars.tools(FUNCTIONS, form=form), text)
    assert not takes(grammars.tools(FUNCTIONS, "required", form=form), text)
    assert read(text, form) == (text, ())
    if not form.bare:
        both = f"{text}\n{written_calls(form, [NOW])}"
        assert takes(grammars.tools(FUNCTIONS, form=form), both)
        assert read(both, form) == (text, (NOW,))


@every_form
def test_a_tool_call_that_is_cut_stays_text(form: ToolForm):
    text = written_calls(form, [TRIP])
    end = text.rindex(form.tags.close.strip() or "]")
    assert parse_tool_calls(text[:end], form, SCHEMAS) == (text[:end], ())
    cut = streamed([*text[:end]], form, SCHEMAS)
    assert cut.content == ""
    assert cut.calls[0].name == "trip"
    assert cut.calls[0].arguments.startswith('{"city": "Linz", "hour": 7, ')


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**9), 10**9),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text("ab \"'\\\n,=(){}[]:<>|é漢😀", max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text("ab_é \"'", min_size=1, max_size=4), inner, max_size=3),
    ),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(
        lambda name, values: ToolCall(name, json.dumps(values)),
        st.sampled_from(["f", "get.x-1"]),
        st.dictionaries(st.text("ab_", min_size=1, max_size=4), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=2,
)


@settings(max_examples=40)
@given(data=st.data(), form=st.sampled_from([*FORMS.values()]), calls=CALLS)
def test_any_values_are_read_back_however_the_text_is_cut(
    data: st.DataObject, form: ToolForm, calls: list[ToolCall]
):
    if form.single:
        calls = calls[:1]
    functions: dict[str, Any] = {"f": {}, "get.x-1": {}}
    if form.syntax is Syntax.TAGS:  # only its schema tells the text 1 from the number
        for call in calls:
            for key, value in json.loads(call.arguments).items():
                kind = {"type": "string"} if isinstance(value, str) else {}
                functions[call.name].setdefault("properties", {})[key] = kind
        calls = calls[:1]
    text = written_calls(form, calls)
    expected = Parsed("", tuple(map(same, calls)))
    assert read(text, form, functions) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert tidy(streamed(pieces, form, functions)) == expected
    assert tidy(streamed([*text], form, functions)) == expected


PARTS = [
    *(
        "<tool_call>",
        "[TOOL_CALLS]",
        "<|tool_call>",
        "<|tool_call_start|>",
        "<|channel|>",
        "[ARGS]",
    ),
    *("<function=", "</function>", "<parameter=", "</parameter>", "call:", "now", "a", "\n", "\\"),
    *("(", ")", "{", "}", "[", "]", "<", ">", ",", ":", "=", '"', "'"),
    '{"name": "now", "arguments": ',
]


@settings(max_examples=40)
@given(text=st.lists(st.sampled_from(PARTS), max_size=14), form=st.sampled_from([*FORMS.values()]))
def test_no_text_is_lost_that_is_no_tool_call(text: list[str], form: ToolForm):
    whole = "".join(text)
    result = parse_tool_calls(whole, form, SCHEMAS)
    if not result.calls:
        assert result.content == whole
    for call in result.calls:
        assert isinstance(json.loads(call.arguments), dict)
    assert streamed(text, form, SCHEMAS) == streamed([*whole], form, SCHEMAS)


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
def test_thoughts_may_precede_a_forced_tool_call(form: ToolForm, grammars: Grammars, takes: Takes):
    call = written_calls(form, [NOW])

    def fits(text: str, marks: ReasoningMarks) -> bool:
        return takes(grammars.tools(FUNCTIONS, "required", form=form, thoughts=marks), text)

    assert fits(call, THOUGHTS)
    assert fits(f"<think>\nhm <tool_call> [\n</think>\n\n{call}", THOUGHTS)
    assert fits(f"hm\n</think>\n\n{call}", replace(THOUGHTS, inside=True))
    assert not fits(call, replace(THOUGHTS, inside=True))
    assert not fits(f"<think>hm</think>no {call}", THOUGHTS)


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (HERMES, '<tool_call>[{"name": "now"}, {"name": "now", "arguments": {}}]', [NOW, NOW]),
        (QWEN_XML, "<tool_call><function=now></function></tool_call>", [NOW]),
        (QWEN_XML, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', [NOW]),
        (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}', [NOW]),
        (LLAMA, ' {"type": "function", "name": "now", "parameters": {}}', [NOW]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "a"}]', [NOW]),
        (MISTRAL, "[TOOL_CALLS]now[ARGS]{}", [NOW]),
        (MISTRAL_ARGS, "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS] {}", [NOW, NOW]),
        (GEMMA, "<|tool_call>call:now{}<tool_call|><|tool_call>call:now{}", [NOW, NOW]),
        (FUNCTION_GEMMA, "<start_function_call>call:now{}<end_function_call>", [NOW]),
        (LFM2, "<|tool_call_start|>[now(), now()]<|tool_call_end|>", [NOW, NOW]),
        (LFM2, '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', [NOW]),
        (HARMONY, "<|channel|>commentary to=functions.now<|message|>{}", [NOW]),
        (HARMONY, "<|channel|>commentary to=functions.now json<|message|>{}<|call|>", [NOW]),
    ],
)
def test_tool_calls_are_read_as_models_also_write_them(
    form: ToolForm, text: str, calls: list[ToolCall]
):
    assert read(text, form) == ("", tuple(calls))


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


def test_a_name_or_key_that_a_form_cannot_write_is_rejected(grammars: Grammars):
    with raises(InvalidRequest, "'a b'"):
        grammars.tools([{"name": "a b"}], form=GEMMA)
    parameters = {"properties": {"a b": {}}}
    with raises(InvalidRequest, "'a b'"):
        grammars.tools([{"name": "f", "parameters": parameters}], form=LFM2)
