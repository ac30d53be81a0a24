"""Reasoning over HTTP: complete, streamed, truncated and continued. A scripted model."""

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.models import resolve
from paceline.runtime.model import Model
from paceline.server.run import Server
from paceline.server.settings import Settings
from support.errors import raises
from support.server import Running, running
from support.thinking import CLOSE, OPEN, TEMPLATES, write_thinking

THOUGHT, ANSWER = "let me see\nit is", "It is 4."
EMPTY = "<think>\n\n</think>\n\n"
CHAT: list[Any] = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture
def server(thinking_server: Running) -> Running:
    """A server with a reasoning model."""
    script(thinking_server, THOUGHT, ANSWER)
    return thinking_server


def script(server: Running, thought: str | None, answer: str) -> list[int]:
    """Script the model's next responses, and return their tokens."""
    encode = server.model.files.tokenizer.encode
    tokens = [] if thought is None else [OPEN, *encode(f"\n{thought}\n"), CLOSE, *encode("\n\n")]
    tokens += encode(answer)
    server.model.engine.script = tokens  # type: ignore[attr-defined]
    return tokens


def chat(server: Running, **fields: Any) -> Any:
    body = {"max_tokens": 80, "temperature": 0, "messages": CHAT, **fields}
    plain = {"max_tokens", "temperature", "messages", "stream", "stop", "tools", "logprobs", "n"}
    plain |= {"reasoning_effort", "response_format", "tool_choice", "stream_options"}
    extra = {name: body.pop(name) for name in [*body] if name not in plain}
    return server.openai.chat.completions.create(model="thinking", extra_body=extra, **body)


def joined(chunks: Any) -> dict[str, str]:
    """Join the deltas of a stream."""
    values = {"content": "", "reasoning_content": "", "reasoning": ""}
    for chunk in chunks:
        for choice in chunk.choices:
            for name in values:
                values[name] += getattr(choice.delta, name, None) or ""
    return values


def test_a_complete_response_separates_and_counts_reasoning(server: Running):
    response = chat(server, return_token_ids=True)
    message = response.choices[0].message
    assert message.content == ANSWER
    assert message.reasoning_content == message.reasoning == THOUGHT
    tokens = server.model.engine.script  # type: ignore[attr-defined]
    assert response.choices[0].token_ids == tokens
    assert response.usage.completion_tokens == len(tokens)
    details = response.usage.completion_tokens_details
    assert details.reasoning_tokens == tokens.index(CLOSE) + 1


@pytest.mark.parametrize("block", [2, 3, 16])
def test_a_streamed_response_matches_the_complete_one_with_any_drafts(server: Running, block: int):
    chunks = list(
        chat(
            server,
            stream=True,
            stream_options={"include_usage": True},
            return_token_ids=True,
            prediction={"type": "content", "content": f"{THOUGHT}\n{ANSWER}"},
            speculation={"policy": "fixed", "max_block": block},
        )
    )
    assert joined(chunks) == {"content": ANSWER, "reasoning_content": THOUGHT, "reasoning": THOUGHT}
    tokens = server.model.engine.script  # type: ignore[attr-defined]
    sent = [id for chunk in chunks for choice in chunk.choices for id in choice.token_ids or []]
    assert sent == tokens
    details = chunks[-1].usage.completion_tokens_details
    assert details.reasoning_tokens == tokens.index(CLOSE) + 1
    names = [
        name
        for chunk in chunks
        for choice in chunk.choices
        for name in ("reasoning_content", "content")
        if getattr(choice.delta, name, None)
    ]
    assert names == sorted(names, reverse=True), "the thought comes first"


def test_include_reasoning_false_omits_reasoning(server: Running):
    response = chat(server, include_reasoning=False)
    assert response.choices[0].message.content == ANSWER
    assert not hasattr(response.choices[0].message, "reasoning_content")
    assert response.usage.completion_tokens_details.reasoning_tokens
    chunks = list(chat(server, stream=True, include_reasoning=False))
    assert joined(chunks) == {"content": ANSWER, "reasoning_content": "", "reasoning": ""}


def prompt_of(server: Running, **fields: Any) -> str:
    """The prompt of a chat as text, with its control tokens."""
    response = chat(server, return_token_ids=True, max_tokens=1, **fields)
    body = {"tokens": response.prompt_token_ids}
    text: str = server.post("/detokenize", body).json()["prompt"]
    return text


def test_effort_none_turns_reasoning_off_through_the_template(server: Running):
    assert prompt_of(server, reasoning_effort="none").endswith(EMPTY)
    off = {"enable_thinking": False}
    assert prompt_of(server, chat_template_kwargs=off).endswith(EMPTY)
    assert not prompt_of(server, reasoning_effort="high").endswith(EMPTY)
    on = {"enable_thinking": True}
    both = prompt_of(server, reasoning_effort="none", chat_template_kwargs=on)
    assert not both.endswith(EMPTY), "an explicit template variable wins"


def test_a_server_without_reasoning_enables_it_for_a_request_with_an_effort(server: Running):
    with running(server.model, Settings(think=False)) as quiet:
        assert prompt_of(quiet).endswith(EMPTY)
        counted = quiet.post("/tokenize", {"messages": CHAT}).json()["tokens"]
        body = {"tokens": counted}
        assert quiet.post("/detokenize", body).json()["prompt"].endswith(EMPTY)
        assert not prompt_of(quiet, reasoning_effort="high").endswith(EMPTY)
        on = {"enable_thinking": True}
        assert not prompt_of(quiet, chat_template_kwargs=on).endswith(EMPTY)


def test_a_server_with_think_rejects_a_model_without_reasoning(model: Model):
    with raises(InvalidRequest, "reasoning"):
        Server(model, Settings(think=True))


WITH_IDS = {"messages": CHAT, "return_token_ids": True}
LINES, LAST_LINES = "let me sée\n\nit is", "It is\n4."


def parts(server: Running, path: str, body: dict[str, Any]) -> tuple[str, str, list[int]]:
    """Return reasoning, text and token ids of a streamed response."""
    thought, text, tokens = "", "", []
    for chunk in server.events(path, {**body, "return_token_ids": True})[:-1]:
        (choice,) = chunk["choices"]
        delta = choice.get("delta", choice)
        thought += delta.get("reasoning_content", "")
        text += delta.get("content") or delta.get("text") or ""
        tokens += choice["token_ids"]
    return thought, text, tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_truncated_anywhere_continues_with_separate_reasoning(
    thinking_server: Running, stream: bool
):
    tokenizer = thinking_server.model.files.tokenizer
    answer = [
        OPEN,
        *tokenizer.encode(f"\n{LINES}\n"),
        CLOSE,
        *tokenizer.encode(f"\n\n{LAST_LINES}"),
    ]
    thinking_server.model.engine.script = answer  # type: ignore[attr-defined]
    whole = thinking_server.post("/v1/chat/completions", WITH_IDS).json()
    prompt = whole["prompt_token_ids"]
    for cut in range(1, len(answer)):
        thinking_server.model.engine.script = answer[cut:]  # type: ignore[attr-defined]
        stopped = len(tokenizer.decode(answer[:cut]).rstrip("\ufffd"))
        body = {"prompt": [*prompt, *answer[:cut]], "continued_tokens": cut, "max_tokens": 99}
        if stream:
            thought, text, tokens = parts(thinking_server, "/v1/completions", body)
        else:
            (choice,) = thinking_server.post("/v1/completions", body).json()["choices"]
            thought, text = choice.get("reasoning_content", ""), choice["text"]
            tokens = answer[cut:]
        assert LINES.endswith(thought)
        assert LAST_LINES.endswith(text)
        assert tokens == answer[cut:]
        expected = tokenizer.decode(answer)[stopped:]
        assert "".join((thought + text).split()) == "".join(expected.split())


def test_sampled_reasoning_in_two_requests_has_the_tokens_of_one(
    tiny_model: Model, tiny_cache: Path, tmp_path: Path
):
    path = write_thinking(tmp_path / "open.gguf", TEMPLATES["deepseek-r1"])
    sampled = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "repetition_penalty": 1.1}
    with running(Model(resolve(str(path), tiny_cache), tiny_model.engine)) as server:
        first = server.post("/v1/chat/completions", {**WITH_IDS, **sampled, "max_tokens": 1}).json()
        prompt = first["prompt_token_ids"]
        chat = {**WITH_IDS, **sampled, "max_tokens": 40}
        thought, text, tokens = parts(server, "/v1/chat/completions", chat)
        assert thought
        assert text == ""
        body = {**sampled, "prompt": [*prompt, *tokens[:15]], "continued_tokens": 15}
        rest = parts(server, "/v1/completions", {**body, "max_tokens": 25})
        assert rest[2] == tokens[15:]
        assert rest[1] == ""
        assert thought.endswith(rest[0])
        server.rest()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "text"},
        {"prompt": [1, 2]},
        {"suffix": "b"},
        {"response_format": {"type": "json_object"}},
        {"continued_tokens": -1},
    ],
)
def test_an_unsupported_continuation_is_rejected_by_name(
    thinking_server: Running, fields: dict[str, Any]
):
    body = {"prompt": [1, 2, 3], "continued_tokens": 2, **fields}
    response = thinking_server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continued_tokens"
