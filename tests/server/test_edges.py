"""Where answers end and blocks do not: each thing that ends one, in the middle of accepted drafts.

The tiny model's own answer comes as a prediction, so that whole blocks of it stand, and what ends
the answer lies inside them. What is expected is cut from that answer here, by hand.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from paceline.runtime.result import Result
from support.server import Running

PROMPT = "this is the one"
LENGTH = 43
BLOCK = 16


class Told(NamedTuple):
    text: str
    reason: str
    ids: list[int]
    tokens: list[str]
    """As the logprobs have them."""
    logprobs: list[float]
    usage: dict[str, Any]
    about: dict[str, Any]
    """The speculation fields of a response."""


def ask(server: Running, *, stream: bool, **fields: Any) -> Told:
    """The answer to a completion, put together where it is a stream."""
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 1,
        "speculation": {"policy": "fixed", "max_block": BLOCK},
        **fields,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
        *events, end = server.events("/v1/completions", body)
        assert end == "[DONE]"
    else:
        response = server.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        events = [response.json()]
    choices = [event["choices"][0] for event in events if event["choices"]]
    known = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    (reason,) = (result["finish_reason"] for result in choices if result["finish_reason"])
    return Told(
        "".join(result["text"] for result in choices),
        reason,
        [token for result in choices for token in result["token_ids"]],
        [text for item in known for text in item["tokens"]],
        [logprob for item in known for logprob in item["token_logprobs"]],
        events[-1]["usage"],
        events[-1]["speculation"],
    )


@pytest.fixture
def whole(server: Running) -> Result:
    """The answer with nothing to end it but its length; its text has the same tokens again."""
    result = server.model.generate(
        PROMPT, raw=True, max_tokens=LENGTH, ignore_eos=True, drafter="none", logprobs=1
    )
    assert server.model.files.tokenizer().encode(result.text) == result.token_ids
    return result


def predicted(whole: Result) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": whole.text}}


def text_of(server: Running, tokens: Sequence[int]) -> str:
    return server.model.files.tokenizer().decode(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_length_cap_and_a_stop_string_in_one_block_the_first_ends_it(
    server: Running, whole: Result, stream: bool
):
    stop = "&zY"
    ends = set()
    for most in range(3, 16):
        cut = text_of(server, whole.token_ids[:most])
        received = ask(server, stream=stream, stop=stop, max_tokens=most, **predicted(whole))
        # What may begin a stop string is held back, and sent when it turns out to be none.
        assert received.text == cut.partition(stop)[0]
        assert received.reason == ("stop" if stop in cut else "length")
        assert received.about["steps"] == 1
        ends.add((received.reason, cut.endswith(("&", "&z"))))
    assert ends == {("length", False), ("length", True), ("stop", False)}


@pytest.mark.parametrize("drafter", ["none", "suffix", "ngram:min=1"])
def test_characters_of_several_tokens_are_sent_whole(server: Running, drafter: str):
    """Each begins with a byte that is picked: what follows it comes with another call."""
    form = {"structured_outputs": {"regex": "([é日😀]|👩‍🚀){12}"}}
    body = {
        **form,
        "ignore_eos": False,
        "speculation": {"drafter": drafter},
        "temperature": 1.5,
        "seed": 3,
    }
    complete = ask(server, stream=False, max_tokens=200, **body)
    assert len(set(complete.text)) > 2
    broken = 0
    for most in range(1, 14):
        cut = text_of(server, complete.ids[:most])
        events = server.events("/v1/completions", {"prompt": PROMPT, "max_tokens": most, **body})
        texts = [text for event in events[:-1] if (text := event["choices"][0]["text"])]
        assert "".join(texts) == cut
        # A character that the length cuts is the only one that is not whole.
        assert not any("\ufffd" in text for text in texts[:-1])
        assert cut.rstrip("\ufffd") == complete.text[: len(cut.rstrip("\ufffd"))]
        broken += cut.endswith("\ufffd")
    assert 0 < broken < 13


FORM: dict[str, Any] = {"structured_outputs": {"regex": "[a-z ]{20}!"}, "ignore_eos": False}


@pytest.mark.parametrize("stream", [False, True])
def test_a_structured_answer_ends_although_its_prediction_continues(server: Running, stream: bool):
    plain = ask(server, stream=stream, **FORM, speculation={"drafter": "none"})
    assert (len(plain.text), plain.text[-1], plain.reason) == (21, "!", "stop")
    more = {"prediction": {"type": "content", "content": f"{plain.text} And {plain.text}"}}
    received = ask(server, stream=stream, **FORM, **more)
    assert received[:5] == plain[:5]
    assert received.usage["completion_tokens"] == len(received.ids) == len(received.tokens)
    assert received.usage["completion_tokens_details"]["accepted_prediction_tokens"] > 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [False, True])
def test_an_end_token_inside_a_draft_is_the_end(server: Running, stream: bool, form: bool):
    """An earlier turn was the same answer: drafted are its end token, too, and what followed it."""
    tokenizer = server.model.files.tokenizer()
    (e,), end = tokenizer.encode("e"), tokenizer.token_id("<|im_end|>")
    text = "e" * 20 + ("!" if form else "")
    if form:
        fields = {**FORM, "logit_bias": {str(e): 60.0, str(end): 60.0}}
    else:  # the end as soon as there may be one
        fields = {"min_tokens": 20, "logit_bias": {str(e): 60.0, str(end): 90.0}}
    received = ask(
        server,
        stream=stream,
        prompt=tokenizer.encode(f"{PROMPT}{text}<|im_end|>{PROMPT * 4}", special=True),
        **{**fields, "ignore_eos": False},
        speculation={"drafter": "suffix", "policy": "fixed", "max_block": BLOCK},
    )
    assert (received.text, received.reason) == (text, "stop")
    assert (
        len(received.ids)
        == len(received.logprobs)
        == received.usage["completion_tokens"]
        == len(text)
    )
    # A step brings a token more than stood, unless the end was among those that stood.
    assert received.about["accepted_by"]["suffix"] == len(text) - (received.about["steps"] - 1)
    # Behind it nothing is tried where a form says that it is the end.
    assert (received.about["drafted_by"] == received.about["accepted_by"]) == form
