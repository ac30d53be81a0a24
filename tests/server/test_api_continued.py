"""Answers that were cut, in their thoughts or after them, and are continued from their tokens."""

from pathlib import Path
from typing import Any

import pytest

from paceline.models import resolve
from paceline.runtime.model import Model
from support.server import Running, running
from support.thinking import CLOSE, OPEN, TEMPLATES, write_thinking

CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}], "return_token_ids": True}
THOUGHT, ANSWER = "let me sée\n\nit is", "It is\n4."


def parts(server: Running, path: str, body: dict[str, Any]) -> tuple[str, str, list[int]]:
    """Thoughts, text and token ids of a streamed answer."""
    thought, text, tokens = "", "", []
    for chunk in server.events(path, {**body, "return_token_ids": True})[:-1]:
        (choice,) = chunk["choices"]
        delta = choice.get("delta", choice)
        thought += delta.get("reasoning_content", "")
        text += delta.get("content") or delta.get("text") or ""
        tokens += choice["token_ids"]
    return thought, text, tokens


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_cut_anywhere_is_continued_with_its_thoughts_apart(
    thinking_server: Running, stream: bool
):
    tokenizer = thinking_server.model.files.tokenizer
    answer = [OPEN, *tokenizer.encode(f"\n{THOUGHT}\n"), CLOSE, *tokenizer.encode(f"\n\n{ANSWER}")]
    thinking_server.model.engine.script = answer  # type: ignore[attr-defined]
    whole = thinking_server.post("/v1/chat/completions", CHAT).json()
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
        assert THOUGHT.endswith(thought)
        assert ANSWER.endswith(text)
        assert tokens == answer[cut:]
        expected = tokenizer.decode(answer)[stopped:]
        assert "".join((thought + text).split()) == "".join(expected.split())


def test_a_sampled_thought_in_two_parts_has_the_tokens_of_one(
    tiny_model: Model, tiny_cache: Path, tmp_path: Path
):
    path = write_thinking(tmp_path / "open.gguf", TEMPLATES["deepseek-r1"])
    sampled = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "repetition_penalty": 1.1}
    with running(Model(resolve(str(path), tiny_cache), tiny_model.engine)) as server:
        first = server.post("/v1/chat/completions", {**CHAT, **sampled, "max_tokens": 1}).json()
        prompt = first["prompt_token_ids"]
        chat = {**CHAT, **sampled, "max_tokens": 40}
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
def test_what_cannot_be_continued_is_refused_by_name(
    thinking_server: Running, fields: dict[str, Any]
):
    body = {"prompt": [1, 2, 3], "continued_tokens": 2, **fields}
    response = thinking_server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continued_tokens"
