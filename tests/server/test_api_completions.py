"""Completions and chats over HTTP with the real openai client."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from openai import BadRequestError

from paceline.runtime.load import load
from paceline.server.body import ChatBody
from support.server import Running, running
from support.tiny import vocabulary, write_tiny

PROMPT = "the rain in the rain in the"


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_max_tokens_defaults_to_sixteen(server: Running):
    response = ask(server, max_tokens=None, ignore_eos=True)
    assert response["usage"]["completion_tokens"] == 16


def test_an_echo_with_zero_tokens_is_the_prompt(server: Running):
    choice = ask(server, echo=True, max_tokens=0)["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    scored = ask(server, echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert len(scored["tokens"]) == len(scored["token_logprobs"])
    assert scored["top_logprobs"] is None


def test_the_stop_token_is_not_part_of_the_response(server: Running):
    (end,) = server.model.files.stop_token_ids[:1]
    response = ask(server, logit_bias={str(end): 100}, return_token_ids=True, logprobs=0)
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["token_ids"] == choice["logprobs"]["tokens"] == []
    assert response["usage"]["completion_tokens"] == 0
    forced = ask(server, logit_bias={str(end): 100}, min_tokens=5)
    assert forced["usage"]["completion_tokens"] == 5


def test_a_suffix_triggers_fill_in_the_middle(tmp_path: Path):
    tokens, types, _ = vocabulary()
    marks = {318: "<|fim_prefix|>", 319: "<|fim_suffix|>", 317: "<|fim_middle|>"}
    for place, mark in marks.items():
        tokens[place], types[place] = mark, int(TokenType.USER_DEFINED)
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    path = write_tiny(tmp_path / "infill.gguf", fields=fields)
    model = load(path, cache_tokens=512)
    with running(model) as server:
        body = {"prompt": "the", "suffix": " rain", "max_tokens": 4, "temperature": 0}
        answer = server.post("/v1/completions", {**body, "return_token_ids": True}).json()
        tokenizer = model.files.tokenizer
        expected = [318, *tokenizer.encode("the"), 319, *tokenizer.encode(" rain"), 317]
        assert answer["choices"][0]["prompt_token_ids"] == expected
        for drafter in ("none", "suffix", "ngram:min=1"):
            again = server.post("/v1/completions", {**body, "speculation": {"drafter": drafter}})
            assert again.json()["choices"][0]["text"] == answer["choices"][0]["text"]
        long = server.post("/v1/completions", {**body, "suffix": "a b " * 2000})
        assert long.json()["error"]["code"] == "context_length_exceeded"
        echo = server.post("/v1/completions", {**body, "echo": True})
        assert echo.json()["error"]["param"] == "echo"


CHAT: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "this is the one and this is the one"},
]
PLAIN: dict[str, Any] = {"messages": CHAT, "max_tokens": 24, "temperature": 0}


def chat(server: Running, **fields: Any) -> Any:
    known = {**PLAIN, **fields}
    extra = {name: known.pop(name) for name in list(known) if name in EXTRA}
    return server.openai.chat.completions.create(model="tiny", extra_body=extra, **known)


EXTRA = {
    *("top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "return_token_ids"),
    *("cache_prompt", "cache_salt", "speculation", "structured_outputs", "chat_template_kwargs"),
}


def alone(server: Running, **options: Any) -> Any:
    return server.model.generate(CHAT, **{"max_tokens": 24, "drafter": "none", **options})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": 7, "temperature": 1.3, "top_p": 0.9},
        {"seed": 8, "temperature": 0.8, "top_k": 5, "min_p": 0.05},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {"40": 5, "41": -100}, "ignore_eos": True, "min_tokens": 3},
        {"seed": 3, "temperature": 1, "stop": ["e", "th"]},
    ],
)
def test_a_response_matches_generate(server: Running, fields: dict[str, Any]):
    options = dict(fields)
    if "logit_bias" in options:
        options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
    expected = alone(server, **options)
    response = chat(server, **fields)
    (choice,) = response.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert response.usage.prompt_tokens == expected.prompt_tokens
    stream = [*chat(server, **fields, stream=True)]
    assert len({chunk.id for chunk in stream}) == 1
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == expected.text
    assert chunks[0].delta.role == "assistant"
    reasons = [chunk.finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [expected.finish_reason]


def test_per_chunk_usage_increases(server: Running):
    body = {**PLAIN, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = server.events("/v1/chat/completions", body)[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 24


def test_accepted_prediction_tokens_are_counted(server: Running):
    expected = alone(server, max_tokens=40, ignore_eos=True)
    response = chat(
        server,
        max_tokens=40,
        ignore_eos=True,
        prediction={"type": "content", "content": [{"type": "text", "text": expected.text}]},
        speculation={"policy": "fixed", "max_block": 8},
    )
    assert response.choices[0].message.content == expected.text
    details = response.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 10
    drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert drafted <= 7 * 39  # at most 7 for each token after the first
    assert details.accepted_prediction_tokens <= 39


def test_draft_token_counts_add_up(server: Running):
    response = chat(
        server,
        max_tokens=60,
        ignore_eos=True,
        speculation={"drafter": "ngram:min=1", "policy": "fixed", "max_block": 5, "pieces": True},
    )
    raw = response.model_dump()
    about = raw["metrics"]["speculative_decoding"]
    histogram = about["acceptance_histogram"]
    assert len(histogram) == about["num_spec_tokens"] + 1
    assert sum(histogram) == about["num_spec_steps"] == len(about["per_step_drafted"]) > 0
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    assert accepted == about["num_accepted_draft_tokens"] == sum(about["per_step_accepted"])
    assert about["num_draft_tokens"] == sum(about["per_step_drafted"])
    timings = raw["timings"]
    assert timings["draft_n"] == about["num_draft_tokens"]
    assert timings["draft_n_accepted"] == accepted
    assert timings["predicted_n"] == 60
    pieces = raw["choices"][0]["pieces"]
    assert "".join(piece["text"] for piece in pieces) == response.choices[0].message.content
    assert sum(piece["source"] is not None for piece in pieces) == accepted
    assert raw["speculation"]["drafter"] == "ngram:min=1"


@pytest.mark.parametrize(
    "drafter", ["table:/etc/passwd", "dflash:/tmp", "model:x", "suffix:earlier", "x", "ngram:x=1"]
)
def test_a_client_cannot_name_files_as_drafters(server: Running, drafter: str):
    with pytest.raises(BadRequestError):
        chat(server, speculation={"drafter": drafter})


def test_an_earlier_refusal_is_its_messages_content(server: Running):
    text = chat(server, messages=[CHAT[1], {"role": "assistant", "content": "No."}, CHAT[1]])
    for fields in (
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No."},
    ):
        turn = {"role": "assistant", **fields}
        response = chat(server, messages=[CHAT[1], turn, CHAT[1]])
        assert response.usage.prompt_tokens == text.usage.prompt_tokens
        assert response.choices[0].message.content == text.choices[0].message.content


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "how it is",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


OTHER = {"type": "function", "function": {"name": "news"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("tools", "choice"), [([WEATHER], NAMED), ([OTHER, WEATHER], ALLOWED)], ids=["named", "allowed"]
)
def test_a_named_or_allowed_function_is_called(server: Running, tools: Any, choice: Any):
    """One that is required, and as a stream, is in `test_api_tool_forms.py`."""
    more = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    (answer,) = chat(server, max_tokens=150, **more).choices
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Paris"},
    )
    assert (answer.message.content or "", answer.finish_reason) == ("", "tool_calls")


def test_a_salted_or_prefill_only_request_is_private(server: Running):
    """The response is neither saved nor used for drafts."""
    prepared = [
        server.server.service.chat(ChatBody.model_validate({"messages": CHAT, **more}))[0]
        for more in ({}, {"cache_salt": "a"}, {"max_tokens": 0})
    ]
    assert [request.request.private for request in prepared] == [False, True, True]
    assert [request.salt for request in prepared] == ["", "a", ""]
    assert [request.prefill_only for request in prepared] == [False, False, True]
