"""Orders of roles at every door, for models whose templates reject them. A scripted model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.scripted import engine_of, prompt_of, scripted_model
from support.server import Running, running

_EACH = (
    "{% for m in messages %}<|im_start|>[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>[assistant]{% endif %}"
)
TEMPLATES = {
    "first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    + _EACH,
    "alternating": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}" + _EACH,
}
S, D = {"role": "system", "content": "S"}, {"role": "developer", "content": "D"}
X, Y = {"role": "user", "content": "x"}, {"role": "user", "content": "y"}
A = {"role": "assistant", "content": "a"}
F = {"name": "f", "arguments": "{}"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": F}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
MARKED = "<instructions>\nD\n</instructions>"
CALLED = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
RETURNED = "<tool_response>\nr\n</tool_response>"

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "first ones": (
        [S, D, X],
        {"first": "[system] S\n\nD[user] x", "alternating": "[user] S\n\nD\n\nx"},
    ),
    "a late one": (
        [S, X, A, D, Y],
        {
            "first": f"[system] S[user] x[assistant] a[user] {MARKED}\n\ny",
            "alternating": f"[user] S\n\nx[assistant] a[user] {MARKED}\n\ny",
        },
    ),
    "a last one": ([X, D], dict.fromkeys(TEMPLATES, f"[user] x\n\n{MARKED}")),
    "a result and a text": (
        [X, CALL, RESULT, Y],
        {
            "first": f"[user] x[assistant] {CALLED}[user] {RETURNED}[user] y",
            "alternating": f"[user] x[assistant] {CALLED}[user] {RETURNED}\n\ny",
        },
    ),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("roles")
    with running(scripted_model(folder, tiny_cache, template=TEMPLATES[request.param])) as instance:
        yield instance


def messages_body(chat: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat in Anthropic's form: a result and the user's text after it are one message."""
    turns: list[dict[str, Any]] = []
    for message in chat:
        role, content = message["role"], message.get("content")
        block: dict[str, Any] = {"type": "text", "text": content}
        if "tool_calls" in message:
            block = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        elif role == "tool":
            block = {"type": "tool_result", "tool_use_id": "c", "content": content}
        role = {"developer": "system", "tool": "user"}.get(role, role)
        if turns and turns[-1]["role"] == role == "user":
            turns[-1]["content"].append(block)
        else:
            turns.append({"role": role, "content": [block]})
    first = {"system": turns.pop(0)["content"]} if chat[0] is S else {}
    return {**first, "messages": turns, "max_tokens": 4}


def response_body(chat: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat in the form of OpenAI's responses."""
    items: list[dict[str, Any]] = []
    for message in chat:
        if "tool_calls" in message:
            items.append({"type": "function_call", "call_id": "c", **F})
        elif message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": "c", "output": "r"})
        else:
            items.append(message)
    first = {"instructions": items.pop(0)["content"]} if chat[0] is S else {}
    return {**first, "input": items, "max_output_tokens": 4}


@pytest.mark.parametrize("case", CASES)
def test_every_door_makes_the_same_prompt_of_an_order_of_roles(
    case: str, server: Running, request: pytest.FixtureRequest
):
    chat, expected = CASES[case]
    prompts = engine_of(server).prompts
    bodies = {
        "/v1/chat/completions": {"messages": chat, "max_tokens": 4},
        "/v1/messages": messages_body(chat),
        "/v1/responses": response_body(chat),
    }
    made = {}
    for path, body in bodies.items():
        prompts.clear()
        response = server.post(path, {**body, "cache_prompt": False})
        assert response.status_code == 200, response.text
        made[path] = prompt_of(server)
    server.rest()
    server.model.generate(chat, max_tokens=4)
    made["python"] = prompt_of(server)
    template = request.node.callspec.params["server"]
    assert made == dict.fromkeys(made, expected[template] + "[assistant]")
