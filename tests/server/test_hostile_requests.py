"""Requests that are meant to do harm: each gets a clear error or a plain answer, and the others who
are served at the same time do not notice.
"""

import time
from typing import Any

import pytest

from support.others import CHAT, TEXT, fault
from support.server import Running

HUGE = 10**20
TURN = {"role": "user", "content": "this is the one"}


@pytest.mark.parametrize(
    "prompt",
    [[HUGE], [-1], [2**63], [2**31, 5], [[5, 6], [320]], [[5], [-HUGE]]],
    ids=["huge", "negative", "int64", "int32", "one of several", "huge negative"],
)
def test_prompt_token_ids_outside_the_vocabulary_are_refused(server: Running, prompt: Any):
    error = fault(server.post(TEXT, {"prompt": prompt}), 400)
    assert error["param"] == "prompt"
    assert "0 to 319" in error["message"]
    assert server.get("/health").status_code == 200
    assert server.post(TEXT, {"prompt": [5], "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "drafter",
    [
        "ngram:max=20000000",
        "ngram:max=17",
        "ngram:min=20000000,max=20000000",
        "ngram:length=20000000",
        f"ngram:max={HUGE}",
        "+".join(["suffix"] * 9),
        "suffix+" * 100_000 + "suffix",
    ],
)
def test_options_of_drafters_are_bounded(server: Running, drafter: str):
    body = {"prompt": "a", "max_tokens": 2, "speculation": {"drafter": drafter}}
    error = fault(server.post(TEXT, body), 400)
    assert "expected" in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    "prediction",
    ["a" * 3_000_000, "a b " * 1_000_000, " " * 3_000_000, "\n\n" * 1_000_000, "é" * 1_000_000],
)
def test_a_prediction_of_millions_of_tokens_is_refused_or_cut(server: Running, prediction: str):
    body = {
        "messages": [TURN],
        "max_tokens": 4,
        "prediction": {"type": "content", "content": prediction},
    }
    started = time.monotonic()
    response = server.post(CHAT, body)
    assert response.status_code in (200, 400), response.text
    assert time.monotonic() - started < 60, "longer than any reading of 3 MB may take"
    if response.status_code == 400:
        assert fault(response, 400)["param"] == "prediction.content"


def test_a_long_prediction_of_one_token_is_drafted_from(server: Running):
    """Every place of it looks like every other."""
    body = {
        "messages": [TURN],
        "max_tokens": 60,
        "temperature": 0,
        "prediction": {"type": "content", "content": "the the " * 200},
    }
    plain = server.post(CHAT, {**body, "speculation": {"drafter": "none"}}).json()
    response = server.post(CHAT, body).json()
    assert response["choices"][0]["message"] == plain["choices"][0]["message"]
