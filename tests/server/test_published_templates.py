"""Published chat templates, rendered as the server does: nothing is lost, and the order is kept."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.runtime.chat import template_chat
from paceline.runtime.model import Model
from paceline.server.body import ChatBody
from paceline.server.service import Service
from support.published import llama_cpp_models
from support.server import running

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

TEMPLATES = 70
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
SYSTEM = {"role": "system", "content": "SYSTEM_1"}
ANSWER = {"role": "assistant", "content": "ANSWER_1"}
SECOND = {"role": "user", "content": "SECOND_1"}
CALL = {"name": "get_weather", "arguments": '{"city": "LINZ_1", "days": 3}'}
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "THOUGHT_1",
    "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "RESULT_1"}

CHATS: dict[str, tuple[list[Mapping[str, Any]], str]] = {
    "plain": ([USER], "FIRST_1"),
    "system": ([SYSTEM, USER], "SYSTEM_1 FIRST_1"),
    "turns": ([SYSTEM, USER, ANSWER, SECOND], "SYSTEM_1 FIRST_1 ANSWER_1 SECOND_1"),
    "a last answer": ([USER, ANSWER], "FIRST_1 ANSWER_1"),
    "tools": ([SYSTEM, USER], "SYSTEM_1 FIRST_1"),
    "results": ([USER, CALLED, RESULT], "FIRST_1 LINZ_1 RESULT_1"),
    "results and turns": (
        [SYSTEM, USER, CALLED, RESULT, ANSWER, SECOND],
        "SYSTEM_1 FIRST_1 LINZ_1 RESULT_1 ANSWER_1 SECOND_1",
    ),
}
WITH_TOOLS = ("tools", "results", "results and turns")


@pytest.fixture(scope="module")
def service(tiny_model: Model, tiny_cache: Path) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tiny_cache))
        with running(Model(tiny_model.files, tiny_model.engine)) as server:
            yield server.server.service


@pytest.fixture(scope="module")
def published(service: Service) -> dict[str, ModelFiles]:
    """The tiny model with each of the templates."""
    paths = sorted((llama_cpp_models() / "templates").glob("*.jinja"))
    return {
        path.stem: replace(service.files, chat_template=path.read_text("utf-8")) for path in paths
    }


@pytest.fixture(scope="module")
def prompts(service: Service, published: dict[str, ModelFiles]) -> dict[str, dict[str, str]]:
    """The name of a chat -> of a model -> the prompt; template by template, as each is compiled."""
    by_name: dict[str, dict[str, str]] = {name: {} for name in CHATS}
    for model, files in published.items():
        for name in CHATS:
            by_name[name][model] = prompt(service, files, name)
    return by_name


def prompt(service: Service, files: ModelFiles, name: str) -> str:
    """The prompt of one of the chats."""
    messages, _ = CHATS[name]
    tools = [TOOL] if name in WITH_TOOLS else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.prompts, "files", files)
        service.prompts.__dict__.pop("tool_form", None)
        variables: Mapping[str, Any] = {}
        with suppress(InvalidRequest):
            variables = files.thinking().switch(True)
        body = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
        try:
            return service.prompts.chat(ChatBody.model_validate(body)).text
        finally:
            service.prompts.__dict__.pop("tool_form", None)


@pytest.mark.parametrize("name", CHATS)
def test_every_published_template_renders_all_of_a_chat_in_its_order(
    name: str, prompts: dict[str, dict[str, str]], published: dict[str, ModelFiles]
):
    assert len(published) == TEMPLATES
    faults = []
    for model, text in prompts[name].items():
        words = CHATS[name][1].split()
        places = [text.find(word) for word in words]
        if places != sorted(places) or -1 in places:
            faults.append((model, dict(zip(words, places, strict=True))))
        if name in WITH_TOOLS and text.count("get_weather") < (1 if name == "tools" else 2):
            faults.append((model, "get_weather"))
        reads = any(field in (published[model].chat_template or "") for field in THOUGHTS)
        reads = reads and model not in WITHOUT_THOUGHTS
        if name == "results" and reads and "THOUGHT_1" not in text:
            faults.append((model, "THOUGHT_1"))
    assert faults == []


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


def chat_of(order: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """A chat whose turns have these roles; a call is one of the assistant's and its result."""
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


def test_every_published_template_renders_every_order_of_roles(published: dict[str, ModelFiles]):
    faults = []
    for (model, files), order in product(published.items(), ORDERS):
        chat = chat_of(order)
        try:
            messages, tools = template_chat(files, chat, [TOOL])
            text = files.template().render(messages, tools=tools)
        except InvalidRequest as error:
            faults.append((model, order, str(error)))
            continue
        places = [text.find(f"WORD_{place}") for place in range(len(chat))]
        if places != sorted(places) or -1 in places:
            faults.append((model, order, places))
    assert faults == []


def test_every_published_template_renders_all_calls_of_a_message(published: dict[str, ModelFiles]):
    words = ("ONE_1", "TWO_1")
    functions = [{"name": "get_weather", "arguments": json.dumps({"city": w})} for w in words]
    calls = [
        {"id": word, "function": function} for word, function in zip(words, functions, strict=True)
    ]
    chat: list[Mapping[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    chat += [{"role": "tool", "tool_call_id": word, "content": f"OF_{word}"} for word in words]
    for files in published.values():
        messages, tools = template_chat(files, chat, [TOOL])
        text = files.template().render(messages, tools=tools)
        assert min(text.count(word) for word in words) >= 2, text
