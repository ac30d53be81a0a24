import json

import pytest

from paceline.tools.calls import PartStream, ToolCall
from support.tool_calls import parse_tool_calls

WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
TIME = '{"name": "time", "arguments": {"zone": 2, "of": ["a", null]}}'
CALLED = (
    ToolCall("weather", '{"city": "Paris"}'),
    ToolCall("time", '{"zone": 2, "of": ["a", null]}'),
)


def marked(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{TIME}\n</tool_call>",
        marked(WEATHER) + marked(TIME),
        marked(f"[{WEATHER}, {TIME}]"),
        marked(f"[\n{WEATHER},\n{TIME}\n]\n"),
        marked(f"[{WEATHER}]") + "\n\n" + marked(TIME),
        f"<tool_call>\n{WEATHER}\n<tool_call>\n{TIME}",
    ],
    ids=["hermes", "no lines", "smollm2", "smollm2 lines", "both", "not closed"],
)
def test_calls_are_found_in_either_format(text: str):
    assert parse_tool_calls(text) == ("", CALLED)


def test_text_around_calls_is_content():
    text = f"Let me see. {marked(WEATHER)} And then:\n{marked(TIME)}\n That is all. "
    assert parse_tool_calls(text) == ("Let me see. And then:\nThat is all.", CALLED)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " plain, with spaces around ",
        "<tool_call>",
        "about <tool_call> and </tool_call>",
        f"<tool_call>\n{WEATHER[:-1]}",
        marked("{}"),
        marked('{"name": 3, "arguments": {}}'),
        marked('{"name": "", "arguments": {}}'),
        marked('{"name": "f", "arguments": [1]}'),
        marked('{"name": "f", "arguments": "no JSON"}'),
        marked('{"name": "f", "arguments": {"x": NaN}}'),
        marked('{"name": "f", "arguments": {"x": 1e999}}'),
        marked(f'[{WEATHER}, "no call"]'),
        marked("[" * 100_000),
        "</tool_call>",
    ],
)
def test_an_incomplete_tool_call_stays_text(text: str):
    assert parse_tool_calls(text) == (text, ())


def test_a_malformed_call_does_not_hide_the_next():
    broken = f"<tool_call>{WEATHER[:30]}"
    assert parse_tool_calls(f"{broken} {marked(WEATHER)}") == (broken, CALLED[:1])


def test_tags_inside_arguments_are_arguments():
    arguments = {"html": "</tool_call><tool_call>", "é": "ü"}
    text = marked(json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False))
    content, (call,) = parse_tool_calls(text)
    assert content == ""
    assert json.loads(call.arguments) == arguments
    assert "ü" in call.arguments


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"id": 4, "name": "f", "arguments": {}}', "{}"),
    ],
    ids=["none", "first", "in a string", "more keys"],
)
def test_common_variants_of_arguments_are_parsed(call: str, arguments: str):
    assert parse_tool_calls(marked(call)).calls == (ToolCall("f", arguments),)


@pytest.mark.parametrize("end", range(len("\n</tool_call>") + 1))
def test_a_partial_closing_tag_is_not_content(end: int):
    call = marked(WEATHER).removesuffix("</tool_call>").rstrip("\n")
    assert parse_tool_calls(call + "\n</tool_call>"[:end]) == ("", CALLED[:1])


def test_a_forced_response_has_only_complete_calls_at_any_truncation():
    text = f"{marked(WEATHER)}\n{marked(WEATHER)}\nThe"
    for end in range(len(text) + 1):
        content, calls = parse_tool_calls(text[:end], forced=True)
        assert content == ""
        assert set(calls) <= {CALLED[0]}
        stream = PartStream(forced=True)
        for letter in text[:end]:
            stream.push(letter)
        stream.push("", end=True)
        assert all(part.whole for part in stream.calls)
        assert [(part.name, part.text) for part in stream.calls] == [*calls]
        if calls:
            assert stream.calls == stream.parts, "text"
    assert len(calls) == 2
