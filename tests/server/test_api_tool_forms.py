"""Tool calls over HTTP in each format. A scripted model whose tags are special tokens."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from paceline.models import resolve
from paceline.runtime.model import Model
from paceline.runtime.prompt import template_chat
from paceline.runtime.tool_messages import describe_tools, fit_calls
from paceline.tools.calls import ToolCall, written_calls
from paceline.tools.forms import FORMS, HERMES, ToolForm, tool_form
from support.scripted import ScriptedEngine
from support.server import Running, running
from support.tool_templates import TEMPLATES, write_calling

DEEPSEEK = FORMS["deepseek"]
GEMMA = FORMS["gemma"]
KIMI = FORMS["kimi"]
MISTRAL_ARGS = FORMS["mistral-args"]
QWEN_XML = FORMS["qwen-xml"]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "make",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "lines": {"type": "integer"}},
            "required": ["name", "lines"],
        },
    },
}
CALL = ToolCall("make", '{"name": "a \\"b\\" {c}, é", "lines": 3}')
USER: dict[str, Any] = {"role": "user", "content": "make it"}
WITH_TOKENS = [form for form in FORMS.values() if form.mark in form.tokens]
TOKENS = 300
"""Enough for a call that is written in letters."""


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path) -> Iterator[Running]:
    """A server of a scripted model."""
    path = write_calling(tmp_path_factory.mktemp("calling") / "calling.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tiny_cache))
        files = resolve(str(path), tiny_cache)
        with running(Model(files, ScriptedEngine(512))) as server:
            yield server


@pytest.fixture
def server(form: ToolForm, calling: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The server, with the template of `form`."""
    prompts = calling.server.service.prompts
    files = replace(prompts.files, chat_template=TEMPLATES[form.name])
    monkeypatch.setattr(prompts, "files", files)
    prompts.__dict__.pop("tool_form", None)
    yield calling
    prompts.__dict__.pop("tool_form", None)
    calling.rest()


def test_tools_reach_the_template_or_become_text(calling: Running):
    files = calling.server.service.files
    assert template_chat(files, [USER], [TOOL]).tools == [TOOL]
    assert template_chat(files, [USER]).tools is None
    without = replace(files, chat_template="{{ messages[0].content }}")
    messages, tools, _ = template_chat(without, [USER], [TOOL])
    assert tools is None
    assert '"lines"' in messages[0]["content"]


def script(server: Running, text: str) -> None:
    """Script the model's next responses; tags in them are their tokens."""
    tokens = server.model.files.tokenizer.encode(text, special=True)
    server.model.engine.script = tokens  # type: ignore[attr-defined]


def chat(server: Running, **fields: Any) -> Any:
    body = {"temperature": 0, "max_tokens": TOKENS, "messages": [USER], "tools": [TOOL], **fields}
    return server.openai.chat.completions.create(model="calling", **body)


def test_unsupported_tools_are_described_in_the_templates_call_format():
    source = TEMPLATES["deepseek"].partition("{% endif %}")[2].replace("tools", "")
    assert tool_form(source) is DEEPSEEK
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}
    chat = [USER, called, {"role": "tool", "content": "made"}]
    system, *rest = describe_tools(chat, [{"name": "TOOL"}], DEEPSEEK)
    assert '{"name":"TOOL"}' in system["content"]
    assert system["content"].endswith(
        written_calls(
            DEEPSEEK, [ToolCall("the function's name", '{"the argument\'s name": "its value"}')]
        )
    )
    assert rest == chat


def test_calls_and_results_have_kimis_ids():
    function = {"name": "make", "arguments": {}}
    calls = [{"id": name, "function": function} for name in ("a", "b")]
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    chat += [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    fitted = fit_calls(chat, KIMI, "tool_calls")
    assert [call["id"] for call in fitted[1]["tool_calls"]] == [
        "functions.make:0",
        "functions.make:1",
    ]
    assert [item["tool_call_id"] for item in fitted[2:]] == ["functions.make:1", "functions.make:0"]


@pytest.mark.parametrize(
    ("form", "choice"),
    [
        *((form, "auto") for form in FORMS.values()),
        *((form, "required") for form in (HERMES, GEMMA, DEEPSEEK, QWEN_XML, MISTRAL_ARGS)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_tool_calls_stream_as_generated_and_forced_ones_when_complete(
    form: ToolForm, choice: str, server: Running
):
    text = written_calls(form, [CALL])
    thought = ""
    if form.name == "qwen-xml":  # its prompt ends inside a thought
        thought, text = "let me see", f"let me see\n</think>\n\n{text}"
    if form.channels:
        thought = "let me see"
        text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{text}"
    script(server, text)
    message = chat(server, tool_choice=choice).choices[0]
    (call,) = message.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        CALL.name,
        json.loads(CALL.arguments),
    )
    assert message.finish_reason == "tool_calls"
    assert not message.message.content
    assert getattr(message.message, "reasoning_content", "") == thought
    assert len(call.id) == (form.id_length or len("call_") + 24)
    speculation = {"policy": "fixed", "max_block": 5, "drafter": "prediction+ngram"}
    chunks = chat(
        server,
        tool_choice=choice,
        stream=True,
        prediction={"type": "content", "content": text.replace("lines", "lined")},
        extra_body={"speculation": speculation},
    )
    deltas = [chunk.choices[0] for chunk in chunks]
    parts = [part for delta in deltas for part in delta.delta.tool_calls or []]
    assert [part.function.name for part in parts] == ["make", *[None] * (len(parts) - 1)]
    assert [part.index for part in parts] == [0] * len(parts)
    assert parts[0].id
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert (len(parts) > 3) is (choice == "auto")
    assert "".join(delta.delta.content or "" for delta in deltas) == ""
    reasoning = [getattr(delta.delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == thought
    assert deltas[-1].finish_reason == "tool_calls"


def whole(server: Running) -> str:
    choice = chat(server).choices[0]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    return str(choice.message.content)


def streamed(server: Running) -> str:
    deltas = [chunk.choices[0].delta for chunk in chat(server, stream=True)]
    assert not any(delta.tool_calls for delta in deltas)
    return "".join(delta.content or "" for delta in deltas)


def in_a_message(server: Running) -> str:
    body = {"model": "calling", "messages": [USER], "max_tokens": TOKENS, "temperature": 0}
    tool = {"name": "make", "input_schema": TOOL["function"]["parameters"]}
    (block,) = server.post("/v1/messages", {**body, "tools": [tool]}).json()["content"]
    return str(block["text"])


# Hundreds of tokens each: every form in one way, every way with several forms.
@pytest.mark.parametrize(
    ("form", "answer"),
    [*zip(WITH_TOKENS, cycle([streamed, whole, in_a_message]), strict=False)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_call_with_a_spelled_out_tag_is_text(
    form: ToolForm, answer: Callable[[Running], str], server: Running
):
    """The model has a token for the tag, so spelling it out quotes a call without making one."""
    before = "</think>\n\n" if form.name == "qwen-xml" else ""
    before = "<|channel|>final<|message|>" if form.channels else before
    typed = written_calls(form, [CALL])
    typed = f"Say: {form.mark if form.bare else ''}{typed} twice"
    tokenizer = server.model.files.tokenizer
    letters = tokenizer.encode(typed)
    assert tokenizer.token_id(form.mark) not in letters
    script = tokenizer.encode(before, special=True) + letters
    server.model.engine.script = script  # type: ignore[attr-defined]
    assert answer(server) == typed


@pytest.mark.parametrize("form", [GEMMA], ids=["gemma"])
def test_calls_in_an_unknown_format_are_text(form: ToolForm, server: Running):
    service = server.server.service
    service.prompts.__dict__["tool_form"] = None
    script(server, "<tool_call>make<arg_key>")
    response = server.post("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]})
    assert response.json()["choices"][0]["message"].get("tool_calls") is None
    with pytest.raises(BadRequestError) as error:
        chat(server, tool_choice="required")
    assert error.value.param == "tool_choice"


@pytest.mark.parametrize("form", [MISTRAL_ARGS, HERMES], ids=["mistral-args", "hermes"])
def test_a_tool_call_truncated_by_max_tokens_is_sent_as_far_as_generated(
    form: ToolForm, server: Running
):
    script(server, written_calls(form, [CALL]))
    whole = chat(server, max_tokens=40).choices[0]
    assert whole.finish_reason == "length"
    assert whole.message.tool_calls is None
    assert "make" in whole.message.content
    deltas = [chunk.choices[0] for chunk in chat(server, max_tokens=40, stream=True)]
    parts = [part for delta in deltas for part in delta.delta.tool_calls or []]
    arguments = "".join(part.function.arguments for part in parts)
    assert arguments
    assert CALL.arguments.startswith(arguments)
    assert deltas[-1].finish_reason == "length"
    # A demanded one comes whole or not at all.
    forced = {"tool_choice": "required", "max_tokens": 40}
    message = chat(server, **forced).choices[0].message
    assert (message.content or "", message.tool_calls) == ("", None)
    deltas = [chunk.choices[0].delta for chunk in chat(server, **forced, stream=True)]
    assert not any(delta.content or delta.tool_calls for delta in deltas)
