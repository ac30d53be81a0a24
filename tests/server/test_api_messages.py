"""Anthropic's messages on the wire: blocks, events, tokens and errors. A scripted model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.other_clients import fault_of_anthropic, slowed
from support.scripted import CALL, DONE, SAID, THOUGHT, always, calling_ls, engine_of, prompt_of
from support.server import Running, running

PATH = "/v1/messages"
TOOL = {
    "name": "ls",
    "description": "Lists files",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
ASKED = {"role": "user", "content": "How many files?"}
BODY: dict[str, Any] = {"max_tokens": 200, "messages": [ASKED], "tools": [TOOL]}


@pytest.fixture
def server(scripted_server: Running) -> Iterator[Running]:
    with calling_ls(scripted_server) as instance:
        yield instance


def asked(server: Running, body: dict[str, Any], **more: Any) -> Any:
    response = server.post(PATH, {**body, **more})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server: Running, body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the events of a stream, and the client's message from them."""
    text = server.post(PATH, {**body, "stream": True}).text
    events = []
    for lines in text.strip().split("\n\n"):
        # Without comments, which come where the machine is slow.
        name, data = (line for line in lines.split("\n") if not line.startswith(":"))
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert events[0]["type"] == "message_start"
    assert events[-1] == {"type": "message_stop"}
    message = dict(events[0]["message"])
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"]), "blocks come one after the other"
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            kind, (name, value) = event["delta"].pop("type"), *event["delta"].items()
            block = message["content"][-1]
            if kind == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + value
            else:
                assert kind == f"{name}_delta"
                block[name] += value
        elif event["type"] == "content_block_stop" and event["index"] in inputs:
            message["content"][-1]["input"] = json.loads(inputs[event["index"]])
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = {**message["usage"], **event["usage"]}
    return events, message


def without_ids(blocks: list[Any]) -> list[Any]:
    return [{k: v for k, v in block.items() if k != "id"} for block in blocks]


CONTENT: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": THOUGHT, "signature": "unsigned"},
    {"type": "text", "text": SAID, "citations": None},
    {"type": "tool_use", "name": "ls", "input": {"path": "."}},
]


def test_a_message_has_blocks_for_reasoning_text_and_each_call(server: Running):
    response = asked(server, BODY, model=server.server.service.name)
    assert without_ids(response["content"]) == CONTENT
    assert (response["type"], response["role"]) == ("message", "assistant")
    assert (response["stop_reason"], response["stop_sequence"]) == ("tool_use", None)
    usage = response["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]
    assert response["content"][2]["id"].startswith("toolu_")


def test_stream_events_add_up_to_the_same_message(server: Running):
    events, message = streamed(server, BODY)
    started = events[0]["message"]["usage"]["input_tokens"]
    assert without_ids(message["content"]) == CONTENT
    assert message["stop_reason"] == "tool_use"
    kinds = [event["type"] for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    whole = asked(server, BODY)
    counts = ("input_tokens", "cache_read_input_tokens")
    total = sum(message["usage"][name] for name in counts)
    assert total == sum(whole["usage"][name] for name in counts)
    assert message["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert started == total


def test_a_tool_result_gets_a_response(server: Running):
    first = asked(server, BODY)
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][2]["id"],
        "content": [{"type": "text", "text": "4 files here"}],
    }
    turns = [
        ASKED,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    second = asked(server, BODY, messages=turns)
    assert second["content"] == [{"type": "text", "text": DONE, "citations": None}]
    assert second["stop_reason"] == "end_turn"
    prompt = prompt_of(server)
    assert prompt.count(CALL) == prompt.count(THOUGHT) == prompt.count(SAID) == 1
    assert prompt.index("<tool_response>\n4 files here") < prompt.index("Go on.")


def test_a_system_prompt_is_text_or_blocks_without_billing_headers(server: Running):
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    blocks = [billing, {"type": "text", "text": "Be brief.", "cache_control": {}}]
    for system in ("Be brief.", blocks):
        asked(server, BODY, system=system)
        assert "system\nBe brief.\n" in prompt_of(server)
    assert "billing" not in prompt_of(server)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 4}, "max_tokens", None),
        ({"stop_sequences": ["never", "files"]}, "stop_sequence", "files"),
        ({}, "end_turn", None),
        ({"max_tokens": 10**9}, "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons_have_anthropic_names(
    server: Running, fields: dict[str, Any], reason: str, sequence: str | None
):
    long = reason == "model_context_window_exceeded"
    engine_of(server).rules = [always("a b " * 1000 if long else DONE)]
    body = {**BODY, "tools": [], **fields}
    _, message = streamed(server, body)
    for item in (message, asked(server, body)):
        assert (item["stop_reason"], item["stop_sequence"]) == (reason, sequence)
        if sequence:
            assert item["content"][0]["text"] == "There are 4 "


def test_tool_choice_is_obeyed_and_server_tools_are_dropped(server: Running):
    others: dict[str, Any] = {"tools": [{"type": "web_search_20250305"}]}
    for more in ({"tool_choice": {"type": "none"}}, others):
        response = asked(server, {**BODY, **more})
        assert [block["type"] for block in response["content"]] == ["thinking", "text"]
        assert response["stop_reason"] == "end_turn"
    assert response["ignored_tools"] == ["web_search_20250305"]
    engine_of(server).rules = [always(CALL)]
    for kind in ("any", "tool"):
        choice = {"type": kind, "name": "ls", "disable_parallel_tool_use": True}
        response = asked(server, BODY, tool_choice=choice)
        assert [block["type"] for block in response["content"]] == ["tool_use"]


def test_errors_outside_the_endpoint_have_anthropics_format(scripted_server: Running):
    model: Model = scripted_server.model
    with running(model, Settings(api_keys=("key",), hosts=("good",))) as server:
        good = {"host": "good"}
        for path in (PATH, "/messages", f"{PATH}/count_tokens"):
            fault_of_anthropic(server.post(path, BODY), 403, "permission_error")
            fault_of_anthropic(server.post(path, BODY, headers=good), 401, "authentication_error")
            keyed = {**good, "x-api-key": "key"}
            assert server.post(path, BODY, headers=keyed).status_code == 200
            fault_of_anthropic(server.get(path, headers=keyed), 405, "invalid_request_error")
            fault_of_anthropic(server.post(path, b"{", headers=keyed), 400, "invalid_request_error")
        fault_of_anthropic(
            server.post(f"{PATH}/batches", BODY, headers=keyed), 404, "not_found_error"
        )
        text = {**keyed, "content-type": "text/plain"}
        response = server.post(PATH, b"{}", headers=text)
        fault_of_anthropic(response, 415, "invalid_request_error")


def test_pings_keep_a_stream_open(scripted_server: Running):
    engine_of(scripted_server).rules = [always(DONE)]
    settings = Settings(keepalive_seconds=0.05)
    with running(scripted_server.model, settings) as server, slowed(server.model, 0.15):
        events, message = streamed(server, {**BODY, "max_tokens": 4, "tools": []})
    assert sum(event["type"] == "ping" for event in events) > 1
    assert message["content"][0]["text"]
