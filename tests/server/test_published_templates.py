"""Published chat templates, rendered as the server does: nothing is lost, and the order is kept."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.runtime.prompt import render_chat, template_chat
from paceline.server.json_body import Function, Tool
from support.published import llama_cpp_models

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

TEMPLATES = 70
NO_TOOLS = "fireworks-ai-llama-3-firefunction-v2"
"""Its template reads a field of its own service, `functions`, and not `tools`."""
THOUGHTS = ("reasoning_content", "message.thinking", "message.reasoning")
"""A template with one of these renders the thoughts between a call and its result."""
WITHOUT_THOUGHTS = {"Apriel-1.6-15b-Thinker-fixed"}
"""Its template has thoughts in answers without calls alone."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "a city"},
                "days": {"type": "integer", "description": "a number"},
            },
            "required": ["city"],
        },
    },
}
USER = {"role": "user", "content": "FIRST_1"}
CALL = {"name": "get_weather", "arguments": '{"city": "LINZ_1", "days": 3}'}
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "THOUGHT_1",
    "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "RESULT_1"}


@pytest.fixture(scope="module")
def published(tiny_files: ModelFiles) -> dict[str, ModelFiles]:
    """The tiny model with each of the templates."""
    paths = sorted((llama_cpp_models() / "templates").glob("*.jinja"))
    assert len(paths) == TEMPLATES
    return {
        path.stem: replace(tiny_files, chat_template=path.read_text("utf-8"))
        for path in paths
        if path.stem != NO_TOOLS
    }


def test_every_published_template_renders_a_function_with_only_a_name(
    published: dict[str, ModelFiles],
):
    tool = Tool(type="function", function=Function(name="get_time")).model_dump()
    for model, files in published.items():
        chat = template_chat(files, [USER], [tool])
        assert "get_time" in files.template.render(chat.messages, tools=chat.tools), model


ROLES = ("system", "user", "assistant", "call")
ORDERS: list[tuple[str, ...]] = [
    ("system", "developer", "user", "system", "call", "user"),
    ("system", "developer", "user", "system", "call", "developer", "call", "call", "user", "user"),
    *(
        order
        for length in (1, 2, 3)
        for order in product(ROLES, repeat=length)
        if next((role for role in order if role != "system"), "") != "call"
    ),
]
"""None begins with a call, which Llama 3's templates take for the user's turn."""


def called(arguments: str) -> dict[str, Any]:
    """Return a message that calls the function."""
    call = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": call}]
    return {**CALLED, "tool_calls": calls}


def chat_of(order: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """Return a chat with these roles; a call is an assistant's call and its result."""
    chat: list[Mapping[str, Any]] = []
    for role in order:
        text = f"WORD_{len(chat)}"
        if role == "call":
            call = {"name": "get_weather", "arguments": json.dumps({"city": text})}
            calls = [{"id": "call_1", "type": "function", "function": call}]
            chat.append({"role": "assistant", "content": None, "tool_calls": calls})
            text = f"WORD_{len(chat)}"
            chat.append({"role": "tool", "tool_call_id": "call_1", "content": text})
        else:
            chat.append({"role": role, "content": [{"type": "text", "text": text}]})
    return chat


CHATS: list[tuple[list[Mapping[str, Any]], Sequence[str]]] = [
    ([USER, CALLED, RESULT], ("FIRST_1", "LINZ_1", "RESULT_1")),
    *((chat_of(order), [f"WORD_{at}" for at in range(len(chat_of(order)))]) for order in ORDERS),
    # Arguments that are not an object.
    *(
        ([USER, called(arguments), RESULT], ("FIRST_1", "RESULT_1"))
        for arguments in ("[1, 2]", "5", "{", "null")
    ),
]
"""Chats, and the words of theirs that a prompt has in this order."""


def test_every_published_template_renders_any_roles_tools_reasoning_and_calls(
    published: dict[str, ModelFiles],
):
    faults = []
    for (model, files), (chat, words) in product(published.items(), CHATS):
        variables: Mapping[str, Any] = {}
        with suppress(InvalidRequest):
            variables = files.thinking.switch(True) if CALLED in chat else {}
        try:
            messages, tools, _ = template_chat(files, chat, [TOOL])
            text = files.template.render(messages, tools=tools, **variables)
        except InvalidRequest as error:
            faults.append((model, chat, str(error)))
            continue
        places = [text.find(word) for word in words]
        names = 1 + any("tool_calls" in message for message in chat)
        if places != sorted(places) or -1 in places or text.count("get_weather") < names:
            faults.append((model, chat, text))
        reads = any(field in (files.chat_template or "") for field in THOUGHTS)
        if CALLED in chat and reads and model not in WITHOUT_THOUGHTS and "THOUGHT_1" not in text:
            faults.append((model, chat, "THOUGHT_1"))
    assert faults == []


def test_every_published_template_can_continue_a_partial_response(published: dict[str, ModelFiles]):
    faults = []
    system = {"role": "system", "content": "S"}
    chats = {"The capital is": [USER], "The capital is ": [system, USER, CALLED, RESULT, USER]}
    for (model, files), (begun, before) in product(published.items(), chats.items()):
        fitted = template_chat(files, [*before, {"role": "assistant", "content": begun}], [TOOL])
        text, messages = render_chat(files, fitted, {}).text, fitted.messages
        closed = files.template.render(messages, tools=fitted.tools, add_generation_prompt=False)
        is_open = text.endswith(begun) and closed.startswith(text.rstrip())
        earlier = fitted._replace(messages=messages[:-1], begun=False)
        if not is_open and text != render_chat(files, earlier, {}).text + begun:
            faults.append((model, text))
    assert faults == []
