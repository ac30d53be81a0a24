"""Completions over HTTP: prompts as text or token ids, echoed with logprobs, in batches."""

from typing import Any

import pytest

from support.server import Running

PROMPT = "the rain in the rain in the"


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_an_answer_is_the_one_that_generate_gives(server: Running):
    expected = server.model.generate(
        PROMPT, raw=True, max_tokens=30, temperature=0.9, seed=4, drafter="none"
    )
    found = server.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0.9, seed=4
    )
    assert found.choices[0].text == expected.text
    stream = server.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0.9, seed=4, stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_a_length_there_are_sixteen_tokens(server: Running):
    found = ask(server, max_tokens=None, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 16


def test_text_token_ids_and_batches_of_them_are_the_same(server: Running):
    ids = server.model.tokens(PROMPT, raw=True)
    (text,) = [choice["text"] for choice in ask(server)["choices"]]
    for prompt in (ids, [PROMPT], [ids]):
        assert [choice["text"] for choice in ask(server, prompt=prompt)["choices"]] == [text]
    both = ask(server, prompt=[PROMPT, "a"])
    mixed = ask(server, prompt=[ids, server.model.tokens("a", raw=True)])
    assert [c["text"] for c in both["choices"]] == [c["text"] for c in mixed["choices"]]
    assert both["choices"][0]["text"] == text
    assert both["usage"]["prompt_tokens"] == len(ids) + 1


def test_answers_to_a_batch_are_numbered_prompt_by_prompt(server: Running):
    found = ask(server, prompt=["a", "the"], n=2, seed=9, temperature=1)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    single = ask(server, prompt="the", n=2, seed=9, temperature=1)
    assert [c["text"] for c in found["choices"][2:]] == [c["text"] for c in single["choices"]]


def test_an_echo_with_logprobs_is_what_an_evaluation_needs(server: Running):
    prompts = [server.model.tokens(text, raw=True) for text in (PROMPT, "one and two", "a")]
    found = ask(server, prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1234)
    for prompt, choice in zip(prompts, found["choices"], strict=True):
        told = choice["logprobs"]
        count = len(prompt) + 1
        assert [len(told[name]) for name in told] == [count] * 4
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert "".join(told["tokens"]) == choice["text"]
        assert [choice["text"][at:] for at in told["text_offset"]][-1] == told["tokens"][-1]
        expected = server.model.generate(
            prompt, max_tokens=1, logprobs=1, prompt_logprobs=True, drafter="none"
        )
        logprobs = [p and p.logprob for p in [*expected.prompt_logprobs, *expected.logprobs]]
        assert told["token_logprobs"] == logprobs
        for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert logprob in top.values()
            assert max(top.values()) >= logprob
        # The one that came was picked greedily.
        assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())


def test_an_echo_without_an_answer_is_the_prompt(server: Running):
    found = ask(server, echo=True, max_tokens=0)["choices"][0]
    assert found["text"] == PROMPT
    assert found["finish_reason"] == "length"
    scored = ask(server, echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert len(scored["tokens"]) == len(scored["token_logprobs"])
    assert scored["top_logprobs"] is None


def test_an_echo_can_be_streamed(server: Running):
    whole = ask(server, echo=True)["choices"][0]["text"]
    *events, _ = server.events(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "echo": True}
    )
    assert "".join(event["choices"][0]["text"] for event in events) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_told_with_their_text(server: Running, stream: bool):
    expected = server.model.generate(
        PROMPT, raw=True, max_tokens=20, ignore_eos=True, drafter="none"
    )
    fields = {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    if not stream:
        (choice,) = ask(server, **fields)["choices"]
        assert choice["token_ids"] == expected.token_ids
        assert choice["prompt_token_ids"] == server.model.tokens(PROMPT, raw=True)
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        return
    body = {"prompt": PROMPT, "temperature": 0, **fields}
    choices = [event["choices"][0] for event in server.events("/v1/completions", body)[:-1]]
    assert [token for c in choices for token in c["token_ids"]] == expected.token_ids
    told = [text for c in choices if c["logprobs"] for text in c["logprobs"]["tokens"]]
    assert "".join(told) == "".join(c["text"] for c in choices) == expected.text


def test_the_token_that_ends_an_answer_is_not_part_of_it(server: Running):
    (end,) = server.model.files.stop_token_ids[:1]
    found = ask(server, logit_bias={str(end): 100}, return_token_ids=True, logprobs=0)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["token_ids"] == choice["logprobs"]["tokens"] == []
    assert found["usage"]["completion_tokens"] == 0
    forced = ask(server, logit_bias={str(end): 100}, min_tokens=5)
    assert forced["usage"]["completion_tokens"] == 5


def test_paths_without_a_version_are_the_same(server: Running):
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    found = server.post("/completions", body).json()
    assert found["choices"] == ask(server, max_tokens=5)["choices"]
