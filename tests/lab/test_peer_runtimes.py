"""The peers themselves, on a tiny model: those that are installed here.

Each token of an answer is held to what the model computes in float64: so it is the prompt that was
asked, decoded greedily, whatever a runtime rounds.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import client
from paceline.client import AS_SERVED, Access
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from paceline.runtime.model import Model
from paceline_lab.peers.base import PeerAnswer, Question, TargetModel
from paceline_lab.peers.llama_server import peer as llama_server
from paceline_lab.peers.llama_server.binary import PROGRAM
from paceline_lab.peers.server import ServerPeer
from support.server import running
from support.tiny import reference_logits

TEXT = "this is one and the user, this is one and the user"
CLOSE = 0.2
"""A pick may be so far below the best, since weights have 8 bits: 0.09 here. The logits deviate by
0.6; of the prompt without its first token picks are 0.26 below."""


@pytest.fixture
def question(model: Model) -> Question:
    return Question("one", "chat", [{"role": "user", "content": TEXT}], model.tokens(TEXT))


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"there is no {PROGRAM} on PATH")
def test_llama_server_says_what_the_model_says_in_every_mode(
    tiny_files: ModelFiles, question: Question, tiny_gguf: Path, model: Model
):
    target = TargetModel(files=tiny_files, context=200, threads=1, say=print)
    peer = llama_server.LlamaServer(target)
    other = replace(question, tokens=model.tokens("2 + 2 = 12"))
    for mode in peer.modes:
        first = peer.answer(question, 24, mode)
        _check(first)
        _check_greedy(tiny_gguf, question, first)
        peer.answer(other, 12, mode)
        assert peer.answer(question, 24, mode).same(first), "whatever was asked before"


def _check(answer: PeerAnswer) -> None:
    assert answer.tokens is not None
    assert answer.count == len(answer.tokens) == 24
    assert answer.first_token_seconds > 0
    assert answer.rate is not None


def _check_greedy(gguf: Path, question: Question, found: PeerAnswer) -> None:
    assert found.tokens is not None
    logits = reference_logits(gguf, [*question.tokens, *found.tokens])[
        len(question.tokens) - 1 : -1
    ]
    picked = logits[np.arange(len(found.tokens)), list(found.tokens)]
    assert (logits.max(axis=1) - picked).max() < CLOSE


def test_a_model_of_another_format_is_not_for_a_peer(tiny_files: ModelFiles):
    checkpoint = replace(tiny_files, weights=None)
    with pytest.raises(ModelError, match="is no GGUF file"):
        _ = TargetModel(files=checkpoint, context=9, say=print).gguf


def test_a_server_of_ours_is_asked_with_and_without_speculation(
    model: Model, question: Question, monkeypatch: pytest.MonkeyPatch
):
    expected = model.generate(TEXT, max_tokens=24)
    sent: list[dict[str, Any]] = []
    ask = client._send

    async def spy(http: Any, endpoint: client.ServedModel, *rest: Any) -> Any:
        sent.append(dict(endpoint.fields))
        return await ask(http, endpoint, *rest)

    monkeypatch.setattr(client, "_send", spy)
    with running(model) as server:
        peer = ServerPeer(f"{server.url}/v1/", Access())
        assert peer.modes == ("plain", "speculation")
        assert f"http://{peer.name}" == f"{server.url}/v1"
        for mode in peer.modes:
            found = peer.answer(question, 24, mode)
            assert (found.text, found.tokens, found.count) == (expected.text, None, 24)
            assert found.rate is not None
            assert found.first_token_seconds > 0
        with pytest.raises(ModelError, match="nobody"):
            ServerPeer(f"{server.url}/v1", Access(model="nobody")).answer(question, 4, "plain")
        server.rest()
    assert sent[0]["speculation"] == {"drafter": "none"}
    assert "speculation" not in sent[1]


def test_a_server_of_others_answers_as_it_was_started():
    assert ServerPeer("http://127.0.0.1:1/v1", Access("some-model")).modes == (AS_SERVED,)


def test_where_nobody_answers_there_is_no_peer():
    with pytest.raises(InvalidRequest, match="models cannot be read"):
        ServerPeer("http://127.0.0.1:1/v1", Access())
