"""Invalid requests: a 4xx error in the API's format names the field, and the server continues."""

import gzip
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.routing import Route

from paceline.errors import InvalidRequest
from paceline.runtime.model import Model
from paceline.server.settings import Settings
from paceline.server.stream_text import Answer
from support.errors import raises
from support.other_clients import CHAT, TEXT, fault, fault_of_anthropic
from support.scripted import fails_in_its_stream
from support.server import Running, running

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TURN = {"role": "user", "content": "a"}
FIRST = "messages[0].content"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"name": "ls", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "ls", "parameters": SCHEMA}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
JSON = {"type": "json_object"}
LOOP = {"max_pattern_size": 3, "min_count": 2}

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN]},
    TEXT: {"prompt": "a"},
    RESPONSES: {"input": "a", "tools": [FUNCTION]},
    MESSAGES: {"messages": [TURN], "max_tokens": 9, "tools": [TOOL]},
}


def content(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    CHAT: {
        "temperature": ("1", -1),
        "top_p": (2,),
        "n": (0,),
        "max_tokens": (-2,),
        "stop": (["a"] * 17, ""),
        "logit_bias": ({"x": 1}, {"99999": 1}, {"1_0": 1}, {" 10": 1}),
        "seed": (2**64, 2.0**64, 1e308, -5, 5.5, True, "5"),
        "top_logprobs": (1,),
        "response_format": ({"type": "json_schema"}, {"type": "text", "schema": SCHEMA}),
        "structured_outputs": ({}, {"regex": "a", "grammar": "start: A"}),
        "tool_choice": (ALLOWED,),
        "functions": ([{}],),
        "guided_json": ({"type": "object"},),
        "continue_final_message": (True,),
        "modalities": (["audio"],),
        "chat_template_kwargs": ({"messages": []}, {"x": 1}, {"enable_thinking": True}),
        "think": (True, False),
        "reasoning_effort": ("enormous",),
        "repetition_detection": ({**LOOP, "min_count": 1}, {**LOOP, "max_pattern_size": 10**9}),
        "messages": (None, []),
    },
    TEXT: {
        "prompt": (None, "", {"a": 1}, ["a"] * 129),
        "suffix": ("b",),
        "best_of": (3,),
        "logprobs": (21,),
    },
    RESPONSES: {
        "previous_response_id": ("resp_0",),
        "top_logprobs": (2,),
        "model": ("gpt-0",),
        "tool_choice": ({"type": "function", "name": "rm"}, {"type": "web_search"}),
        "prompt": ({"id": "p"},),
        "background": (True,),
        "truncation": ("auto",),
    },
}
"""Path -> field -> values that are refused by its name."""

WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    CHAT: [
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "response_format": JSON}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "tools": [NAMED]}, "structured_outputs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tools"),
        ({"speculation": {"policy": "wild"}}, "policy"),
        ({"speculation": {"max_block": 99}}, "max_block"),
        ({"speculation": {"drafer": "none"}}, "speculation.drafer"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        (
            {"repetition_detection": {**LOOP, "max_pattern_size": "3"}},
            "repetition_detection.max_pattern_size",
        ),
        ({"messages": [TURN, {"role": "nobody", "content": "a"}]}, "messages[1].role"),
        ({"messages": content({"type": "text"})}, f"{FIRST}[0].text"),
    ],
    TEXT: [({"echo": True, "logprobs": 1, "stream": True}, "echo")],
    RESPONSES: [
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0]"),
        ({"input": content({"type": "input_image"})}, "input[0].content[0]"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]},
            "input[0].call_id",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required", "tools": []}, "tools"),
        ({"text": {"format": JSON}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
    MESSAGES: [
        ({"model": "claude-0"}, "claude-0"),
        ({"messages": content({"type": "image", "source": {}})}, f"{FIRST}[0].image: this"),
        (
            {"messages": content({"type": "tool_result", "tool_use_id": "toolu_0"})},
            "tool_use 'toolu_0' not found",
        ),
        ({"messages": content({"type": "tool_use", "id": "a", "name": "b"})}, "assistant"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "role"),
        (
            {
                "messages": [TURN, {"role": "assistant", "content": "So"}],
                "output_format": {"type": "json_schema", "schema": {}},
                "tools": [],
            },
            "continued",
        ),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"tools": [{**TOOL, "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "input_schema": {"type": "nothing"}}]}, "nothing"),
        ({"tools": [{**TOOL, "input_schema": {"title": "x" * 70_000}}]}, "prompt is too long: "),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
}
"""Path -> fields, and OpenAI's `param`, or words of the message where the form has none."""

INSTEAD = [
    (TEXT, {"max_completion_tokens": 3}, "use max_tokens"),
    (RESPONSES, {"max_tokens": 3}, "use max_output_tokens"),
    (MESSAGES, {"max_completion_tokens": 3}, "use max_tokens"),
    (CHAT, {"system": "S"}, "use messages"),
    (CHAT, {"stop_sequences": ["a"]}, "use stop"),
    (CHAT, {"output_format": {"type": "json_schema"}}, "use response_format"),
    (MESSAGES, {"reasoning_effort": "high"}, "use thinking"),
    (TEXT, {"tools": [{}]}, "remove it"),
]
"""Fields of other endpoints, which would change the answer if they were left out."""


def message_of(response: Any, path: str, status: int) -> str:
    """Return the message of an error, checking its API's format."""
    if path != MESSAGES:
        return str(fault(response, status)["message"])
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    return fault_of_anthropic(response, status, kind)


@pytest.mark.parametrize("path", BODIES)
def test_an_invalid_value_is_reported_in_each_apis_error_format(server: Running, path: str):
    wrong = [({name: value}, name) for name, v in VALUES.get(path, {}).items() for value in v]
    for fields, named in wrong + WRONG[path]:
        status = 404 if "model" in fields else 400
        for stream in (False, True):
            response = server.post(path, {**BODIES[path], "stream": stream, **fields})
            message = message_of(response, path, status)
            if path == MESSAGES:
                assert named in message, fields
            else:
                error = response.json()["error"]
                assert error["param"] == named, fields
                assert error["type"] == "invalid_request_error"
    assert server.post(path, {**BODIES[path], "max_tokens": None}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow_errors_have_the_wording_that_clients_look_for(
    server: Running, stream: bool
):
    for count in (512, 600, 100_000):
        turn = {"role": "user", "content": "word " * count}
        body = {"messages": [turn], "max_tokens": 9, "stream": stream}
        text = message_of(server.post(MESSAGES, body), MESSAGES, 400)
        words = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", text)
        assert words and int(words[1]) > int(words[2]) == 511
        for path, field in ((CHAT, "messages"), (RESPONSES, "input"), (TEXT, "prompt")):
            long = turn["content"] if path == TEXT else [turn]
            error = fault(server.post(path, {field: long, "stream": stream}))
            assert error["code"] == "context_length_exceeded"
            assert "maximum context length is 512 tokens" in error["message"]
            assert error["n_ctx"] == 512 < error["n_prompt_tokens"]


def test_an_integer_field_accepts_a_float_with_zero_fraction(server: Running):
    body = {"temperature": 1.5, "return_token_ids": True, **BODIES[CHAT]}
    bodies = [{"seed": n, "max_tokens": n, "n": n, "top_k": n} for n in (5, 5.0)]
    whole, real = (server.post(CHAT, {**body, **more}).json()["choices"] for more in bodies)
    assert whole == real and len(whole) == 5
    fault(server.post(CHAT, {**body, "max_tokens": 5.5}))
    assert server.post(CHAT, {**body, "seed": -1}).status_code == 200


HALF = "\ud800"
HALVES = [
    (CHAT, {"messages": [{"role": "user", "content": HALF}]}, FIRST),
    (CHAT, {"messages": content({"type": "text", "text": HALF})}, f"{FIRST}[0].text"),
    (CHAT, {"messages": [TURN], "stop": ["a", HALF]}, "stop[1]"),
    (CHAT, {"messages": [TURN], "tools": [{"function": {HALF: 1}}]}, "tools[0].function"),
    (TEXT, {"prompt": HALF}, "prompt"),
    (TEXT, {"prompt": "a", HALF: 1}, None),
    (RESPONSES, {"input": "a", "metadata": {"a": HALF}}, "metadata.a"),
    (MESSAGES, {"messages": [TURN], "system": HALF}, "system"),
    ("/tokenize", {"prompt": HALF}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "field"), HALVES)
def test_a_lone_surrogate_is_reported(
    path: str, body: dict[str, Any], field: str | None, server: Running
):
    for text in (json.dumps(body), json.dumps(body, ensure_ascii=False)):
        response = server.post(path, text.encode("utf-8", "surrogatepass"))
        message = message_of(response, path, 400)
        assert f"{field or 'the body'} is not valid Unicode: unpaired surrogate" in message
        assert path == MESSAGES or response.json()["error"]["param"] == field


def test_invalid_structures_and_fields_of_other_endpoints_are_reported(server: Running):
    for form in ({"regex": "("}, {"grammar": "start: nobody"}):
        fault(server.post(CHAT, {**BODIES[CHAT], "structured_outputs": form}))
    for path, fields, instead in INSTEAD:
        message = message_of(server.post(path, {**BODIES[path], **fields}), path, 400)
        assert min(fields) in message
        assert instead in message


@pytest.mark.parametrize("path", BODIES)
def test_an_error_before_a_stream_starts_has_a_status(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: Any) -> Any:
        raise RuntimeError("secret")

    for stream in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(Answer, "progress", fails)
            response = server.post(path, {**BODIES[path], "stream": stream})
        assert response.status_code == 500
        assert ("api_error" if path == MESSAGES else "server_error") in response.text
        assert "secret" not in response.text
        server.rest()
    assert server.post(path, BODIES[path]).status_code == 200


LAST = {RESPONSES: "response.failed", MESSAGES: "error"}
"""Type of the event that ends a stream with a fault; of the others, an error before [DONE]."""


@pytest.mark.parametrize("path", BODIES)
def test_an_error_in_a_stream_is_its_last_event(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
):
    fails_in_its_stream(server, monkeypatch)
    events = server.events(path, {**BODIES[path], "speculation": {"drafter": "none"}})
    assert "secret" not in str(events)
    last = events[-1] if path in LAST else events[-2]
    assert last.get("type") == LAST.get(path)
    if path == RESPONSES:
        assert events[-2]["type"] == "error"
        RESPONSE_EVENT.validate_python(last, strict=True)
    error = last["response"]["error"] if path == RESPONSES else last["error"]
    assert (error.get("type") or error["code"]) in ("api_error", "server_error")
    server.rest()
    assert server.post(path, BODIES[path]).status_code == 200


@pytest.mark.parametrize(
    ("body", "coding", "words"),
    [
        (gzip.compress(b'{"prompt": "a"}', mtime=0), "identity", "gzip"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0), "gzip", "gzip"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "identity", "byte order mark"),
        ('{"prompt": "a"}'.encode("utf-16"), "identity", "UTF-16"),
    ],
)
def test_an_unsupported_content_encoding_is_reported(
    server: Running, body: bytes, coding: str, words: str
):
    response = server.post(TEXT, body, headers={"content-encoding": coding})
    assert words in fault(response, 400 if coding == "identity" else 415)["message"]


def test_a_missing_chat_template_error_suggests_an_alternative(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    prompts = server.server.service.prompts
    monkeypatch.setattr(prompts, "files", replace(prompts.files, chat_template=None))
    error = fault(server.post(CHAT, {"messages": [TURN]}))
    assert "/v1/completions" in error["message"]


def test_requests_beyond_the_queue_limit_are_rejected(module_model: Model):
    with running(module_model, Settings(queue=3)) as server:
        fault(server.post(TEXT, {"prompt": ["a", "b"], "n": 2}))


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/api/chat", "/v1"),
        ("/api/generate", "/v1"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/m/x/v1/responses", "/v1/responses"),
        ("/v1/nothing", "/v1"),
    ],
)
def test_an_unknown_url_error_points_to_the_api(path: str, where: str, server: Running):
    for response in (server.post(path, {}), server.get(path)):
        assert response.status_code == 404
        assert f"the API is at {where}, and /openapi.json" in response.json()["error"]["message"]


def test_a_server_behind_a_proxy_accepts_a_path_prefix(model: Model):
    with running(model, root_path="/m/x", api_keys=("a" * 20,)) as server:
        for root in ("/m/x", ""):
            assert server.get(f"{root}/health").status_code == 200
            assert server.get(f"{root}/").headers["content-type"].startswith("text/html")
            assert server.get(f"{root}/v1/models").status_code == 401
            headers = {"x-api-key": "a" * 20}
            about = server.get(f"{root}/openapi.json", headers=headers).json()
            assert about["servers"] == [{"url": "/m/x/"}]
            reply = server.post(f"{root}/v1/messages", BODIES[MESSAGES], headers=headers)
            assert reply.json()["type"] == "message"
            message_of(server.post(f"{root}/v1/messages", {}, headers=headers), MESSAGES, 400)
            wrong = server.get(f"{root}/api/tags", headers=headers).json()["error"]["message"]
            assert "the API is at /m/x/v1, and /m/x/openapi.json" in wrong
    for wrong in ("m/x", "/m/", "/", "/m x", "/m?x"):
        with raises(InvalidRequest, wrong):
            Settings(root_path=wrong)


def test_openapi_lists_the_paths(server: Running):
    about = server.get("/openapi.json").json()
    served = {route.path for route in server.server.app.routes if isinstance(route, Route)}
    # A path with and without /v1 is listed once; pages are for browsers.
    once = {path.removeprefix("/v1").replace(":path}", "}") for path in served}
    pages = {path for path in once if "." in path or path == "/"}
    assert once - pages == {path.removeprefix("/v1") for path in about["paths"]}
    assert {"ChatBody", "CompletionBody", "Message"} <= set(about["components"]["schemas"])
