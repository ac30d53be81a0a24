"""Every format of tool calls: written calls are parsed for any chunking of the text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.tools.calls import ToolCall, written_calls
from paceline.tools.forms import FORMS, HERMES, Syntax, ToolForm
from support.tool_calls import (
    NOW,
    SCHEMAS,
    TRIP,
    Parsed,
    parse_tool_calls,
    read,
    same,
    streamed,
    tidy,
)

FUNCTION_GEMMA = FORMS["function-gemma"]
GEMMA = FORMS["gemma"]
HARMONY = FORMS["harmony"]
LFM2 = FORMS["lfm2"]
LLAMA = FORMS["llama"]
MISTRAL = FORMS["mistral"]
MISTRAL_ARGS = FORMS["mistral-args"]
QWEN_XML = FORMS["qwen-xml"]


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_a_truncated_tool_call_stays_text(form: ToolForm):
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
def test_any_values_round_trip_in_any_chunking(
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
def test_text_outside_tool_calls_is_never_lost(text: list[str], form: ToolForm):
    whole = "".join(text)
    result = parse_tool_calls(whole, form, SCHEMAS)
    if not result.calls:
        assert result.content == whole
    for call in result.calls:
        assert isinstance(json.loads(call.arguments), dict)
    assert streamed(text, form, SCHEMAS) == streamed([*whole], form, SCHEMAS)


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
def test_common_variants_of_tool_calls_are_parsed(form: ToolForm, text: str, calls: list[ToolCall]):
    assert read(text, form) == ("", tuple(calls))
