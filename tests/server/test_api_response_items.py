"""Responses with tools, reasoning and state: items, events and storage. A scripted model."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.requests import Request

from paceline.server import response_store
from paceline.server.body import Message
from paceline.server.response_store import ResponseStore
from support.scripted import (
    CALL,
    DONE,
    SAID,
    THOUGHT,
    always,
    called,
    calling_ls,
    engine_of,
    prompt_of,
    when,
)
from support.server import Running, good

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "ls",
    "description": "Lists files",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
BODY: dict[str, Any] = {"input": "How many files?", "tools": [TOOL]}
KNOWN: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def server(scripted_server: Running) -> Iterator[Running]:
    with calling_ls(scripted_server) as instance:
        yield instance


def asked(server: Running, body: dict[str, Any], **more: Any) -> Any:
    reply = good(server.post(PATH, {**body, **more}))
    Response.model_validate(reply, strict=True)
    return reply


def without_ids(items: list[Any]) -> list[Any]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


OUTPUT: list[dict[str, Any]] = [
    {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
        "status": "completed",
    },
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": SAID, "annotations": [], "logprobs": []}],
        "status": "completed",
    },
    {"type": "function_call", "name": "ls", "arguments": '{"path": "."}', "status": "completed"},
]


def result_of(response: Any, output: Any = "4 files here") -> dict[str, Any]:
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def test_a_response_has_items_for_reasoning_text_and_each_call(server: Running):
    response = asked(server, BODY)
    assert without_ids(response["output"]) == OUTPUT
    assert response["status"] == "completed"
    assert response["tools"][0]["name"] == "ls"
    details = response["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < response["usage"]["output_tokens"]


def test_stream_events_come_in_openais_order(server: Running):
    events = server.events(PATH, BODY)
    for event in events:
        KNOWN.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_text.delta", "output_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    last = events[-1]["response"]
    assert without_ids(last["output"]) == OUTPUT
    by_item: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == last["output"][event["output_index"]]["id"]
            by_item[event["item_id"]] = by_item.get(event["item_id"], "") + event["delta"]
    assert list(by_item.values()) == [THOUGHT, SAID, '{"path": "."}']
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == last["output"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert {item["status"] for item in added} == {"in_progress"}


def test_a_tool_result_continues_by_id_items_or_references(server: Running):
    first = asked(server, BODY)
    turn = {"role": "user", "content": BODY["input"]}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    for more in (
        {"previous_response_id": first["id"], "input": [result_of(first)]},
        {"input": [turn, *first["output"], result_of(first)]},
        {"input": [turn, *references, result_of(first)]},
    ):
        second = asked(server, BODY, **more)
        assert second["output"][0]["content"][0]["text"] == DONE
        assert second["previous_response_id"] == more.get("previous_response_id")
        prompt = prompt_of(server)
        assert prompt.count("How many files?") == prompt.count(CALL) == prompt.count(THOUGHT) == 1
        assert "<tool_response>\n4 files here\n</tool_response>" in prompt
    asked(server, BODY, previous_response_id=second["id"], input="Sure?")
    assert prompt_of(server).index(DONE) < prompt_of(server).index("Sure?")


def test_reasoning_round_trips_in_encrypted_content(server: Running):
    include = ["reasoning.encrypted_content"]
    (item, *_) = asked(server, BODY, include=include, store=False)["output"]
    sent = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    for content, there in ((sent, True), ({**sent, "encrypted_content": "gAAAA"}, False)):
        asked(server, BODY, input=[content, {"role": "user", "content": "go on"}])
        assert (THOUGHT in prompt_of(server)) is there


def test_unknown_tool_types_are_dropped(server: Running):
    others = [{"type": "web_search"}, {"type": "tool_search", "name": "patch"}]
    response = asked(server, BODY, tools=[*others, TOOL])
    assert [tool["type"] for tool in response["tools"]] == ["function"]
    assert response["ignored_tools"] == ["web_search", "tool_search patch"]
    assert "patch" not in prompt_of(server)
    response = asked(server, BODY, tools=others)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


SPACE = {
    "type": "namespace",
    "name": "mcp__disk",
    "description": "Functions of a disk.",
    "tools": [TOOL, {"type": "other", "name": "patch"}, {**TOOL, "name": "df"}],
}
"""As Codex sends the functions of an MCP server."""
NAMED = {"name": "ls", "namespace": "mcp__disk"}


@pytest.fixture
def disk_server(server: Running) -> Running:
    engine = engine_of(server)
    engine.rules = [when("4 files here", DONE), always(called("mcp__disk__ls", {"path": "."}))]
    return server


def test_functions_in_a_namespace_are_called_by_name_and_namespace(disk_server: Running):
    body = {**BODY, "tools": [TOOL, SPACE]}
    first = asked(disk_server, body)
    (call,) = first["output"]
    assert NAMED.items() <= call.items()
    assert first["tools"][1] == {**SPACE, "tools": [SPACE["tools"][0], SPACE["tools"][2]]}
    assert first["ignored_tools"] == ["other patch of mcp__disk"]
    listed = prompt_of(disk_server)
    for name in ("ls", "mcp__disk__ls", "mcp__disk__df"):
        assert listed.count(f'"name": "{name}"') == 1
    assert listed.count("Functions of a disk.") == 1
    turn = {"role": "user", "content": BODY["input"]}
    prompts = []
    for more in (
        {"previous_response_id": first["id"], "input": [result_of(first)]},
        {"input": [turn, call, result_of(first)]},
    ):
        assert asked(disk_server, {**body, **more})["output"][0]["content"][0]["text"] == DONE
        prompts.append(prompt_of(disk_server))
    assert prompts[0] == prompts[1]
    assert "<tool_call>" in prompts[0]


def test_a_stream_includes_the_called_functions_namespace(disk_server: Running):
    events = disk_server.events(PATH, {**BODY, "tools": [SPACE]})
    items = [event["item"] for event in events if "item" in event]
    assert [NAMED.items() <= item.items() for item in items] == [True, True]
    (done,) = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "ls"
    assert items[-1] == events[-1]["response"]["output"][0]


PATCH = '*** Begin Patch\n*** Add File: a "b"\n+é\\n😀\n*** End Patch\n'
CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "***" /(.|\\n)+/'},
}
"""As Codex sends it."""
IN_SPACE = {"type": "namespace", "name": "functions", "description": "", "tools": [CUSTOM]}


@pytest.mark.parametrize("tools", [[CUSTOM, TOOL], [IN_SPACE]])
def test_a_custom_tool_is_a_function_with_one_string_argument(server: Running, tools: list[Any]):
    name = "apply_patch" if tools[0] is CUSTOM else "functions__apply_patch"
    engine_of(server).rules = [when("made the file", DONE), always(called(name, {"input": PATCH}))]
    body = {**BODY, "tools": tools, "tool_choice": {"type": "custom", "name": "apply_patch"}}
    first = asked(server, body)
    (call,) = first["output"]
    assert {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "input": PATCH,
    }.items() <= call.items()
    assert call.get("namespace") == (None if tools[0] is CUSTOM else "functions")
    assert call["id"].startswith("ctc_")
    assert first["tools"][0] == tools[0]
    assert "ignored_tools" not in first
    listed = prompt_of(server)
    assert '"properties": {"input": {"type": "string"}}' in listed
    assert listed.count("Edits files.") == listed.count("The input has this grammar:") == 1
    events = server.events(PATH, body)
    for event in events:
        KNOWN.validate_python(event, strict=True)
    inputs = [e for e in events if e["type"].startswith("response.custom_tool_call_input")]
    assert "".join(e.get("delta", "") for e in inputs) == inputs[-1]["input"] == PATCH
    assert [e["type"].rpartition(".")[2] for e in inputs[-2:]] == ["delta", "done"]
    assert events[-1]["response"]["output"][0]["input"] == PATCH
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"]}
    output |= {"output": [{"type": "input_text", "text": "made the file"}]}
    turn = {"role": "user", "content": BODY["input"]}
    prompts = []
    for more in (
        {"previous_response_id": first["id"], "input": [output]},
        {"input": [turn, call, output]},
        {"input": [turn, {"type": "item_reference", "id": call["id"]}, output]},
    ):
        second = asked(server, {**body, "tool_choice": "auto", **more})
        assert second["output"][0]["content"][0]["text"] == DONE
        prompts.append(prompt_of(server))
    assert len(set(prompts)) == 1
    cut = server.events(PATH, {**body, "tool_choice": "auto", "max_output_tokens": 70})[-1][
        "response"
    ]["output"]
    assert PATCH.startswith(cut[0]["input"])


def test_tools_in_an_additional_tools_item_are_available(server: Running):
    engine_of(server).rules = [always(called("functions__apply_patch", {"input": "x"}))]
    offers = {"type": "additional_tools", "role": "developer", "tools": [IN_SPACE]}
    turn = {"role": "user", "content": "Do it."}
    (call,) = asked(server, {"input": [offers, turn]})["output"]
    assert (call["type"], call["namespace"]) == ("custom_tool_call", "functions")


def test_namespaced_function_names_do_not_collide(disk_server: Running):
    taken = {**TOOL, "name": "mcp__disk__ls"}
    other = {**SPACE, "name": "mcp", "tools": [{**TOOL, "name": "disk__ls"}]}
    response = asked(disk_server, BODY, tools=[SPACE, other, taken])
    assert response["output"][0]["name"] == "mcp__disk__ls"
    assert "namespace" not in response["output"][0]
    for suffix in ("", "_", "__"):
        assert f'"name": "mcp__disk__ls{suffix}"' in prompt_of(disk_server)


def allowed(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "required", "tools": [*tools]}


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ({"type": "function", **NAMED}, [TOOL, SPACE]),
        ({"type": "function", "name": "ls"}, [SPACE]),
        (
            allowed({"type": "namespace", "name": "mcp__disk"}, {"type": "web_search"}),
            [TOOL, SPACE],
        ),
    ],
)
def test_tool_choice_may_name_a_namespaced_function(disk_server: Running, choice: Any, tools: Any):
    response = asked(disk_server, BODY, tool_choice=choice, tools=tools)
    assert response["output"][0]["namespace"] == "mcp__disk"


LS = {"type": "function", "name": "ls"}


@pytest.mark.parametrize("choice", ["required", LS, allowed(LS), "none"])
def test_tool_choice_is_obeyed(server: Running, choice: Any):
    kinds = ["reasoning", "message"]
    if choice != "none":
        engine_of(server).rules = [always(CALL)]
        kinds = ["function_call"]
    response = asked(server, BODY, tool_choice=choice, tools=[TOOL, {**TOOL, "name": "rm"}])
    assert [item["type"] for item in response["output"]] == kinds


def test_a_response_truncated_by_length_is_incomplete(server: Running):
    for event in (asked(server, BODY, max_output_tokens=5), None):
        result = event or server.events(PATH, {**BODY, "max_output_tokens": 5})[-1]["response"]
        assert result["status"] == "incomplete"
        assert result["output"][-1]["status"] == "incomplete"


def test_the_response_store_is_bounded_and_evicts_the_least_recently_used(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(response_store, "_MAX_BYTES", 100_000)
    store = ResponseStore()
    for name in "abcdefgh":
        if name > "a":
            store.messages(0, "a")
        response = {"id": name, "output": []}
        store.add(0, response, [Message(role="user", content="x" * 20_000)])
    left = [name for name in "abcdefgh" if (0, name) in store._stored]
    assert left == ["a", "f", "g", "h"]
    for name in left:
        scope = {"type": "http", "method": "DELETE", "path_params": {"response_id": name}}
        asyncio.run(store.reply(Request(scope)))
    assert store._size == 0


def test_a_response_ended_by_a_stop_token_is_completed(own_server: Running):
    values: Any = {"type": "json_schema", "name": "n", "schema": {"enum": ["yes"]}}
    logprobs: Any = ["message.output_text.logprobs"]
    with own_server.openai.responses.stream(
        model="tiny", input="say yes", text={"format": values}, include=logprobs, top_logprobs=1
    ) as stream:
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == '"yes"'
    message: Any = final.output[0]
    (part,) = message.content
    assert "".join(logprob.token for logprob in part.logprobs) == '"yes"'
