"""Completions over HTTP: prompts as text or token ids, echoed with logprobs, in batches."""

from pathlib import Path
from typing import Any

from gguf import TokenType

from paceline.runtime.load import load
from support.server import Running, running
from support.tiny import vocabulary, write_tiny

PROMPT = "the rain in the rain in the"


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_an_answer_is_the_one_that_generate_gives(server: Running):
    expected = server.model.generate(
        PROMPT, raw=True, max_tokens=30, temperature=0.9, seed=4, drafter="none"
    )
    response = server.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0.9, seed=4
    )
    assert response.choices[0].text == expected.text
    stream = server.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0.9, seed=4, stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def test_max_tokens_defaults_to_sixteen(server: Running):
    response = ask(server, max_tokens=None, ignore_eos=True)
    assert response["usage"]["completion_tokens"] == 16


def test_an_echo_without_an_answer_is_the_prompt(server: Running):
    choice = ask(server, echo=True, max_tokens=0)["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    scored = ask(server, echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert len(scored["tokens"]) == len(scored["token_logprobs"])
    assert scored["top_logprobs"] is None


def test_the_token_that_ends_an_answer_is_not_part_of_it(server: Running):
    (end,) = server.model.files.stop_token_ids[:1]
    response = ask(server, logit_bias={str(end): 100}, return_token_ids=True, logprobs=0)
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["token_ids"] == choice["logprobs"]["tokens"] == []
    assert response["usage"]["completion_tokens"] == 0
    forced = ask(server, logit_bias={str(end): 100}, min_tokens=5)
    assert forced["usage"]["completion_tokens"] == 5


def test_a_suffix_asks_a_model_with_the_tokens_for_what_is_between(tmp_path: Path):
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


def test_a_suffix_without_the_tokens_is_refused_by_name(server: Running):
    answer = server.post("/v1/completions", {"prompt": "the", "suffix": " rain"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "suffix"
    assert "has no tokens to fill in the middle" in answer.json()["error"]["message"]
