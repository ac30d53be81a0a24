"""Wrong requests: a 4xx, OpenAI's error object, and the next request is answered."""

import gzip
from dataclasses import replace
from typing import Any

import pytest
from starlette.routing import Route

from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.others import CHAT, TEXT, fault
from support.server import Running, running

TURN = {"role": "user", "content": "a"}
PART = "messages[0].content"


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
        ({"stream": "yes"}, "stream"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "function", "function": {}}}, None),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "f"}}],
                    },
                }
            },
            "tool_choice",
        ),
        ({"functions": [{}]}, "functions"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, PART),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, PART),
        ({"speculation": {"drafter": "model:/x"}}, "speculation.drafter"),
        ({"speculation": {"policy": "wild"}}, "policy"),
        ({"speculation": {"max_block": 99}}, "max_block"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
    ],
)
def test_an_invalid_value_is_named_and_affects_no_other_request(
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
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ],
)
def test_completions_name_the_invalid_field(
    server: Running, fields: dict[str, Any], param: str | None
):
    error = fault(server.post(TEXT, {"prompt": "a", **fields}))
    if param:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "coding", "words"),
    [
        (gzip.compress(b'{"prompt": "a"}', mtime=0), "identity", "gzip"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0), "gzip", "gzip"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "identity", "byte order mark"),
        ('{"prompt": "a"}'.encode("utf-16"), "identity", "UTF-16"),
    ],
)
def test_a_body_in_another_coding_is_told_so(server: Running, body: bytes, coding: str, words: str):
    response = server.post(TEXT, body, headers={"content-encoding": coding})
    assert words in fault(response, 400 if coding == "identity" else 415)["message"]


def test_a_model_without_a_chat_template_says_what_to_use(server: Running):
    service = server.server.service
    files = service.files
    service.prompts.files = replace(files, chat_template=None)
    try:
        error = fault(server.post(CHAT, {"messages": [TURN]}))
    finally:
        service.prompts.files = files
    assert "/v1/completions" in error["message"]


def test_more_answers_than_the_queue_holds_are_rejected(module_model: Model):
    with running(module_model, Settings(max_waiting=3)) as server:
        fault(server.post(TEXT, {"prompt": ["a", "b"], "n": 2}))


def test_openapi_lists_the_paths(server: Running):
    about = server.get("/openapi.json").json()
    assert {CHAT, TEXT, "/v1/responses", "/health"} <= set(about["paths"])
    served = {route.path for route in server.server._app.routes if isinstance(route, Route)}
    # A path with and without /v1 is listed once; pages are for browsers.
    once = {path.removeprefix("/v1").replace(":path}", "}") for path in served}
    listed = {path.removeprefix("/v1") for path in about["paths"]}
    pages = {path for path in once if "." in path or path == "/"}
    assert listed <= once
    assert once - pages == listed
    named = about["components"]["schemas"]
    assert {"ChatBody", "CompletionBody", "Message"} <= set(named)
