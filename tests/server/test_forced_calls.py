"""Forced calls of the default model, which was not trained on tools: whatever the limit of tokens,
an answer has complete calls and nothing else.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.runtime.model import Model
from support.server import Running, running

pytestmark = pytest.mark.real_model

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
FUNCTION = {"name": "get_weather", "description": "Weather of a city"}
CALL = ("get_weather", {"city": "Paris"})
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [ASKED],
        "tools": [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}],
        "tool_choice": "required",
    },
    "/v1/responses": {
        "input": [ASKED],
        "tools": [{"type": "function", **FUNCTION, "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "get_weather"},
    },
    "/v1/messages": {
        "messages": [ASKED],
        "tools": [{**FUNCTION, "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}


@pytest.fixture(scope="module")
def shipped(real_model: Model) -> Iterator[Running]:
    with running(real_model) as server:
        yield server


def whole(path: str, response: Any) -> tuple[str, list[tuple[str, Any]]]:
    """The text of a response, and its calls."""
    if path == "/v1/chat/completions":
        message = response["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"] or "", [
            (call["name"], json.loads(call["arguments"])) for call in calls
        ]
    items = response["output" if path == "/v1/responses" else "content"]
    texts = [item.get("text", "") for item in items]
    texts += [part["text"] for item in items for part in item.get("content", ())]
    calls = [item for item in items if item["type"] in ("function_call", "tool_use")]
    return "".join(texts), [
        (item["name"], json.loads(item["arguments"]) if "arguments" in item else item["input"])
        for item in calls
    ]


def streamed(path: str, events: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The text of a stream, and its calls."""
    text, names, arguments = "", list[str](), list[str]()
    for event in events:
        delta = event.get("delta") if isinstance(event, dict) else None
        if path == "/v1/chat/completions":
            for choice in event["choices"] if isinstance(event, dict) else ():
                text += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    if "name" in call["function"]:
                        names.append(call["function"]["name"])
                        arguments.append("")
                    arguments[call["index"]] += call["function"]["arguments"]
            continue
        started = event.get("item") or event.get("content_block") or {}
        if event["type"] in ("response.output_item.added", "content_block_start") and (
            started["type"] in ("function_call", "tool_use")
        ):
            names.append(started["name"])
            arguments.append("")
        elif event["type"] == "response.function_call_arguments.delta":
            arguments[-1] += delta
        elif event["type"] == "response.output_text.delta":
            text += delta
        elif event["type"] == "content_block_delta":
            text += delta.get("text", "")
            if "partial_json" in delta:
                arguments[-1] += delta["partial_json"]
    return text, [(name, json.loads(value)) for name, value in zip(names, arguments, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_forced_answer_of_the_default_model_is_one_complete_call_or_none(
    shipped: Running, path: str, stream: bool
):
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    counts = []
    # A stream and a response at once cut the call at every second place.
    for most in (4, 20, 25, 27, 29, 31, 33, 60) if stream else (1, 14, 24, 26, 28, 30, 32, 60):
        body = {**BODIES[path], "temperature": 0, "stream": stream, limit: most}
        if stream:
            text, calls = streamed(path, shipped.events(path, body))
        else:
            response = shipped.post(path, body)
            assert response.status_code == 200, response.text
            text, calls = whole(path, response.json())
        assert text == "", most
        assert calls in ([], [CALL]), most
        counts.append(len(calls))
    assert counts == sorted(counts)
    assert counts[-1] == 1
