"""Wrong requests: a 4xx, OpenAI's error object, and the next request is answered."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.runtime import Model
from paceline.serving.settings import Settings
from support.server import Running, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TURN = {"role": "user", "content": "a"}


def fault(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"messages": NaN}', b"1e999"),
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_json_object(server: Running, body: bytes):
    assert fault(server.post(CHAT, body))["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("s", "messages"),
        ([123], "messages[0]"),
        ([{}], "messages[0].role"),
        ([None], "messages[0]"),
        ([{"role": 123, "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 123}], "messages[0].content"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([TURN, {"role": "nobody", "content": "a"}], "messages[1].role"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_messages_of_a_wrong_shape_are_named(server: Running, messages: Any, param: str):
    assert fault(server.post(CHAT, {"messages": messages}))["param"] == param
    assert fault(server.post(CHAT, {"messages": messages, "stream": True}))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, None),
        ({"seed": "x"}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "nothing"}},
                }
            },
            None,
        ),
        ({"structured_outputs": {"regex": "("}}, None),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "function", "function": {}}}, None),
        ({"functions": [{}]}, "functions"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"speculation": {"drafter": "model:/x"}}, "speculation.drafter"),
        ({"speculation": {"policy": "wild"}}, "policy"),
        ({"speculation": {"max_block": 99}}, "max_block"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
    ],
)
def test_a_wrong_value_is_named_and_harms_nobody(
    server: Running, fields: dict[str, Any], param: str | None
):
    error = fault(server.post(CHAT, {"messages": [TURN], **fields}))
    if param:
        assert error["param"] == param
    assert server.post(CHAT, {"messages": [TURN], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, None),
        ({"prompt": [[1.5]]}, None),
        ({"prompt": [True]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": [10**6]}, None),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ],
)
def test_completions_name_what_is_wrong(server: Running, fields: dict[str, Any], param: str | None):
    error = fault(server.post(TEXT, {"prompt": "a", **fields}))
    if param:
        assert error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses"])
def test_a_prompt_longer_than_the_context_is_refused_with_numbers(
    server: Running, path: str, stream: bool
):
    long = "word " * 1000
    body = {"messages": [{"role": "user", "content": long}], "prompt": long, "input": long}
    error = fault(server.post(path, {**body, "stream": stream}))
    assert error["code"] == "context_length_exceeded"
    assert error["n_ctx"] == 512
    assert error["n_prompt_tokens"] > 1000


def test_more_tokens_than_the_context_holds_end_at_its_end(server: Running):
    found = server.post(TEXT, {"prompt": "a", "max_tokens": 10**9, "ignore_eos": True}).json()
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["total_tokens"] == 512


def test_another_model_is_not_found(server: Running):
    error = fault(server.post(CHAT, {"model": "gpt-9", "messages": [TURN]}), 404)
    assert error["code"] == "model_not_found"


def test_other_paths_and_methods_are_refused(server: Running):
    assert fault(server.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert fault(server.get(CHAT), 405)["code"] == "method_not_allowed"
    assert fault(server.post("/v1/models"), 405)


def test_a_model_without_a_chat_template_says_what_to_use(server: Running):
    service = server.server.service
    files = service.files
    service.files = replace(files, chat_template=None)
    try:
        error = fault(server.post(CHAT, {"messages": [TURN]}))
    finally:
        service.files = files
    assert "/v1/completions" in error["message"]


def test_more_answers_than_may_wait_are_refused_for_good(module_model: Model):
    with running(module_model, Settings(most_waiting=3)) as server:
        fault(server.post(TEXT, {"prompt": ["a", "b"], "n": 2}))


def test_the_description_of_the_server_names_its_paths(server: Running):
    about = server.get("/openapi.json").json()
    assert {CHAT, TEXT, "/v1/responses", "/health"} <= set(about["paths"])
    named = about["components"]["schemas"]
    assert {"ChatBody", "CompletionBody", "Error", "Message"} <= set(named)
