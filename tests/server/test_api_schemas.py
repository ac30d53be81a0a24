"""Schemas and limits that a client sends, at each API, whole and as a stream: held, or a 400 that
names the field.
"""

import json
from typing import Any

import pytest

from support.server import Running

LARGE = 2**53 - 1
SCHEMA = {"enum": [LARGE]}
TURN = {"role": "user", "content": "a"}
CHAT = ("/v1/chat/completions", {"messages": [TURN], "max_tokens": 40})
TEXT = ("/v1/completions", {"prompt": "a", "max_tokens": 40})
RESPONSES = ("/v1/responses", {"input": "a", "max_output_tokens": 40})
MESSAGES = ("/v1/messages", {"messages": [TURN], "max_tokens": 40})
PATHS = dict([CHAT, TEXT, RESPONSES, MESSAGES])


def forms(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (path, fields) for each way to pass a schema."""
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    short = {"type": "json_schema", "schema": schema}
    object_form = {"type": "json_object", "schema": schema}
    named = {**short, "name": "x"}
    return [
        *((path, {"response_format": wrapped}) for path in PATHS),
        *((path, {"response_format": object_form}) for path in PATHS),
        ("/v1/chat/completions", {"response_format": short}),
        ("/v1/chat/completions", {"structured_outputs": {"json": schema}}),
        ("/v1/responses", {"text": {"format": named}}),
        ("/v1/responses", {"text": {"format": {**named, "type": "json_object"}}}),
        ("/v1/messages", {"output_config": {"format": short}}),
        ("/v1/messages", {"output_format": short}),
    ]


def answer(server: Running, path: str, body: dict[str, Any]) -> str:
    reply = server.post(path, {**PATHS[path], **body}).json()
    if path == "/v1/messages":
        return str(reply["content"][0]["text"])
    if path == "/v1/responses":
        return str(reply["output"][0]["content"][0]["text"])
    return str(reply["choices"][0].get("text") or reply["choices"][0]["message"]["content"])


@pytest.mark.parametrize(("path", "body"), forms(SCHEMA), ids=str)
def test_a_schema_is_enforced_with_exact_numbers_in_each_api(
    path: str, body: dict[str, Any], server: Running
):
    assert answer(server, path, body) == str(LARGE)
    events = server.post(path, {**PATHS[path], **body, "stream": True}).text
    deltas = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    texts = [delta.get("delta") for delta in deltas if "delta" in delta]
    if path in ("/v1/completions", "/v1/chat/completions"):
        choices = [choice for delta in deltas for choice in delta["choices"]]
        texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    pieces = [text.get("text") if isinstance(text, dict) else text for text in texts]
    assert "".join(piece or "" for piece in pieces) == str(LARGE)


@pytest.mark.parametrize(("path", "body"), forms({"properties": {"p": {"pattern": "(?!a)"}}}))
def test_an_unsupported_schema_keyword_is_reported_in_each_api(
    path: str, body: dict[str, Any], server: Running
):
    for stream in (False, True):
        reply = server.post(path, {**PATHS[path], **body, "stream": stream})
        assert reply.status_code == 400
        assert "properties.p.pattern" in reply.json()["error"]["message"]


PARAMETERS = {
    "properties": {"id": SCHEMA, "n": {"minimum": -(2**63)}, "p": {"pattern": r"\b"}},
    "required": ["id"],
}
"""Two parts cannot be followed."""
ABSENT = "absent"


def calling(path: str, parameters: Any) -> dict[str, Any]:
    """Return a request that requires a call of a function with these parameters."""
    field = "input_schema" if path == "/v1/messages" else "parameters"
    tool: dict[str, Any] = {"name": "get", **({} if parameters == ABSENT else {field: parameters})}
    if path == "/v1/messages":
        return {"max_tokens": 90, "tools": [tool], "tool_choice": {"type": "any"}}
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 90}
    tool = {"function": tool} if path == "/v1/chat/completions" else tool
    return {**limit, "tools": [{"type": "function", **tool}], "tool_choice": "required"}


CALLING = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLING)
def test_an_unsupported_keyword_in_tool_parameters_rejects_no_request(
    path: str, stream: bool, server: Running
):
    greedy = {"temperature": 0, "stream": stream}  # a sampled call may not end within its tokens
    reply = server.post(path, {**PATHS[path], **calling(path, PARAMETERS), **greedy})
    assert reply.status_code == 200 and (stream or str(LARGE) in reply.text), reply.text


@pytest.mark.parametrize(
    "parameters",
    [ABSENT, None, {}, {"type": "object", "properties": {}}, {"properties": None}, {"a": None}],
    ids=str,
)
@pytest.mark.parametrize("path", CALLING)
def test_a_function_without_parameters_is_called_without_arguments(
    path: str, parameters: Any, server: Running
):
    reply = server.post(path, {**PATHS[path], **calling(path, parameters), "temperature": 0})
    arguments = '"input":{}' if path == "/v1/messages" else '"arguments":"{}"'
    assert arguments in reply.text


def test_stop_sequences_also_work_in_messages(server: Running):
    path, body = MESSAGES
    sent = {**body, "structured_outputs": {"regex": "abc"}, "stop": "c"}
    assert server.post(path, sent).json()["content"][0]["text"] == "ab"
