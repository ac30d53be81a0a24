"""Peers of formats and servers of others, on a tiny model."""

from dataclasses import replace
from typing import Any

import pytest

from paceline import client
from paceline.client import AS_SERVED, Access
from paceline.errors import ModelError
from paceline.models import ModelFiles
from paceline.runtime.model import Model
from paceline_lab.peers.base import Question, TargetModel
from paceline_lab.peers.server import ServerPeer
from support.server import running

TEXT = "this is one and the user, this is one and the user"


@pytest.fixture
def question(model: Model) -> Question:
    return Question("one", "chat", [{"role": "user", "content": TEXT}], model.tokens(TEXT))


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
