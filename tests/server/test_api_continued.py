"""Chats that end with the assistant's message, and calls with non-object arguments.

The same at every API and in Python. A scripted model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from support.scripted import (
    DONE,
    TEMPLATE,
    always,
    called,
    engine_of,
    prompt_of,
    scripted_model,
    when,
)
from support.server import Running, good, running

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "How many?"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
NO_END = "<|im_start|><|im_end|>{% for m in messages %}{{ m.content | length }}{% endfor %}"
"""A template that replaces a message with its length."""


@pytest.fixture(scope="module")
def begun_server(tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path) -> Iterator[Running]:
    with running(scripted_model(tmp_path_factory.mktemp("begun"), tiny_cache)) as instance:
        yield instance


@pytest.fixture
def server(begun_server: Running) -> Iterator[Running]:
    engine_of(begun_server).rules = [always(DONE)]
    yield begun_server
    begun_server.rest()


def bodies(turns: list[dict[str, Any]], **more: Any) -> dict[str, dict[str, Any]]:
    return {
        CHAT: {"messages": turns, "max_tokens": 64, **more},
        MESSAGES: {"messages": turns, "max_tokens": 64, **more},
        RESPONSES: {"input": turns, "max_output_tokens": 64, **more},
    }


def text_of(reply: Any) -> str:
    if "choices" in reply:
        return str(reply["choices"][0]["message"]["content"])
    if "output" in reply:
        return str(reply["output"][-1]["content"][-1]["text"])
    return str(reply["content"][-1]["text"])


def asked(server: Running, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt and the text of a response."""
    engine_of(server).prompts.clear()
    reply = good(server.post(path, {**body, "cache_prompt": False}))
    return prompt_of(server), text_of(reply)


def kept(text: str, kind: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text}]


EMPTY: list[Any] = ["", " \n", [], kept("", "text"), kept(" ", "output_text")]
BEGUN: list[Any] = ["There are", " There are ", kept("There are", "text")]


@pytest.mark.parametrize("content", EMPTY)
def test_an_empty_final_assistant_message_is_dropped(server: Running, content: Any):
    last = {"role": "assistant", "content": content}
    without = bodies([USER])
    for path, body in bodies([USER, last, last]).items():
        if path == MESSAGES and "output_text" in str(content):
            continue  # of OpenAI's API
        assert asked(server, path, body) == asked(server, path, without[path]), path
    thought = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    body = {"messages": [USER, thought], "max_tokens": 64}
    assert asked(server, CHAT, body) == asked(server, CHAT, without[CHAT])


@pytest.mark.parametrize("content", BEGUN)
def test_a_partial_response_is_continued_the_same_in_every_api(server: Running, content: Any):
    text = content if isinstance(content, str) else content[0]["text"]
    engine_of(server).rules = [when(f"assistant\n{text}", " 4.")]
    turns = [USER, {"role": "assistant", "content": content}]
    expected = f"user\nHow many?\nassistant\n{text}"
    for path, body in bodies(turns).items():
        prompt, answer = asked(server, path, body)
        assert prompt == expected, path
        assert answer == " 4.", path
    count = server.post(f"{MESSAGES}/count_tokens", bodies(turns)[MESSAGES]).json()
    whole = server.post(MESSAGES, {**bodies(turns)[MESSAGES], "cache_prompt": False}).json()
    listed = server.post("/tokenize", {"messages": turns}).json()
    assert count["input_tokens"] == whole["usage"]["input_tokens"] == listed["count"]
    server.rest()
    engine_of(server).prompts.clear()
    assert server.model.generate(turns, max_tokens=64).text == " 4."
    assert prompt_of(server) == expected


def test_partial_reasoning_and_a_partial_response_with_calls_are_continued(server: Running):
    engine_of(server).rules = [always("<think>look.</think>Done.")]
    turns = [USER, {"role": "assistant", "content": "<think>\nI should"}]
    body = {"messages": turns, "max_tokens": 64}
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("look.", "Done.")
    engine_of(server).rules = [always(f" I call.\n{called('f', {'a': 'b'})}")]
    body["tools"] = [{"type": "function", "function": TOOL}]
    body["messages"] = [USER, {"role": "assistant", "content": "Now"}]
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    assert message["content"].strip() == "I call."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "b"}'}


@pytest.mark.parametrize(
    ("begun", "prompt"),
    [("There are", "assistant\n\n\n\n\nThere are"), ("<think>\nI should", "assistant\n\nI should")],
)
def test_a_response_without_reasoning_continues_after_empty_reasoning(
    server: Running, begun: str, prompt: str
):
    turns = [USER, {"role": "assistant", "content": begun}]
    body = {"messages": turns, "chat_template_kwargs": {"enable_thinking": False}}
    assert asked(server, CHAT, body)[0] == f"user\nHow many?\n{prompt}"


def test_a_continued_response_is_stored_as_one_message(server: Running):
    engine_of(server).rules = [when("Sure?", "Yes."), always(" 4.")]
    turns = [USER, {"role": "assistant", "content": "There are"}]
    first = server.post(RESPONSES, {"input": turns}).json()
    asked(server, RESPONSES, {"input": "Sure?", "previous_response_id": first["id"]})
    assert "assistant\nThere are 4.\nuser\nSure?" in prompt_of(server)


def test_vllm_fields_control_whether_the_last_message_is_continued(server: Running):
    turns = [USER, {"role": "assistant", "content": "There are"}]
    opened, closed = "assistant\nThere are", "assistant\nThere are\nassistant\n"
    for fields, end in (
        ({}, opened),
        ({"continue_final_message": True, "add_generation_prompt": False}, opened),
        ({"add_generation_prompt": False}, opened),
        ({"continue_final_message": False}, closed),
        ({"continue_final_message": False, "add_generation_prompt": True}, closed),
        ({"add_generation_prompt": True}, closed),
    ):
        body = {"messages": turns, "max_tokens": 64, **fields}
        assert asked(server, CHAT, body)[0].endswith(end), fields
    for fields, named in (
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "add_generation_prompt": False}, "continue_final_message"),
        (
            {"messages": turns, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"messages": turns, "response_format": {"type": "json_object"}}, "messages"),
        (
            {
                "messages": turns,
                "tools": [{"type": "function", "function": TOOL}],
                "tool_choice": "required",
            },
            "messages",
        ),
    ):
        response = server.post(CHAT, {"max_tokens": 64, **fields})
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == named


def test_a_final_tool_call_is_closed_in_every_api(server: Running):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    last = {"role": "assistant", "content": None, "tool_calls": [call]}
    for path, body in (
        (CHAT, {"messages": [USER, last], "max_tokens": 64}),
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [use]}]}),
        (RESPONSES, {"input": [USER, item]}),
    ):
        assert asked(server, path, body)[0].endswith("</tool_call>\nassistant\n"), path


def test_a_template_that_cannot_leave_a_turn_open_returns_400(tmp_path: Path, tiny_cache: Path):
    model = scripted_model(tmp_path, tiny_cache, template=NO_END)
    turns = [USER, {"role": "assistant", "content": "There are"}]
    with running(model) as server:
        for path, body in bodies(turns).items():
            response = server.post(path, body)
            assert response.status_code == 400
            assert "end with the user's message" in response.json()["error"]["message"]
        server.rest()
        with pytest.raises(InvalidRequest, match="cannot continue it"):
            model.generate(turns)


ITERATES = TEMPLATE.replace(
    "{{ call.function.arguments | tojson }}",
    "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
)
JOINS = TEMPLATE.replace(
    "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"
)
PARSES = TEMPLATE.replace(
    "{{ call.function.arguments | tojson }}",
    (
        "{% if call.function.arguments is not mapping %}{{ raise_exception('no dict') }}{% endif %}"
        "{{ call.function.arguments | tojson }}"
    ),
)


@pytest.mark.parametrize("template", [TEMPLATE, ITERATES, JOINS, PARSES])
def test_non_object_tool_arguments_break_no_template(
    template: str, tmp_path: Path, tiny_cache: Path
):
    with running(scripted_model(tmp_path, tiny_cache, template=template)) as server:
        for arguments in ("[1, 2]", "5", "{", "null", '"text"', "", "{}"):
            call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
            use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
            item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
            last = {"role": "assistant", "content": "", "tool_calls": [call]}
            done = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
            output = {"type": "function_call_output", "call_id": "c", "output": "r"}
            prompts = [
                asked(server, CHAT, {"messages": chat, "max_tokens": 4})[0]
                for chat in ([USER, last, {"role": "tool", "tool_call_id": "c", "content": "r"}],)
            ]
            turns = [USER, {"role": "assistant", "content": [use]}]
            turns += [{"role": "user", "content": [done]}]
            prompts.append(asked(server, MESSAGES, {"messages": turns, "max_tokens": 4})[0])
            prompts.append(asked(server, RESPONSES, {"input": [USER, item, output]})[0])
            assert len(set(prompts)) == 1
            assert '"name": "f"' in prompts[0]
            shown = arguments if template in (TEMPLATE, JOINS) else ""
            assert shown.strip('"') in prompts[0]


def test_a_template_error_names_the_message_without_paths(tmp_path: Path, tiny_cache: Path):
    refuses = "{% if 'bad' in m.content %}{{ raise_exception('no bad words') }}{% endif %}"
    template = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages %}" + refuses)
    turns = [USER, {"role": "assistant", "content": "a bad one"}, USER, USER]
    with running(scripted_model(tmp_path, tiny_cache, template=template)) as server:
        for path, body in bodies(turns).items():
            response = server.post(path, body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert "no bad words" in error["message"]
            assert str(tmp_path) not in error["message"]
            assert f"{'input' if path == RESPONSES else 'messages'}[1]" in error["message"]


def test_a_template_error_names_no_message_if_tools_were_merged(tmp_path: Path, tiny_cache: Path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% if 'bad' in m.content %}{{ raise_exception('no bad words') }}{% endif %}{% endfor %}"
    )
    with running(scripted_model(tmp_path, tiny_cache, template=template)) as server:
        tools = [{"type": "function", "function": TOOL}]
        body = {"messages": [{"role": "user", "content": "a bad one"}], "tools": tools}
        response = server.post(CHAT, body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
