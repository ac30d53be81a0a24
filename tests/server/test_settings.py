"""Where a request's sampling comes from over HTTP, and the repetition stop that it may ask for."""

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.runtime.model import Model
from paceline.runtime.request import Defaults
from support.server import Running, running

CHAT: list[Any] = [{"role": "user", "content": "this is the one"}]
LAYERS = Defaults(
    registry={"temperature": 0.8, "top_p": 0.9},
    model={"temperature": 0.1, "repetition_penalty": 1.3, "max_tokens": 14},
)
LOOP = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4}
ALWAYS = {"40": 100}
"""A bias that leaves one token to pick."""


@pytest.fixture(scope="module")
def chosen(module_model: Model) -> Iterator[Running]:
    """A server of a model that has settings of its own, and an entry in the registry."""
    with running(Model(module_model.files, module_model.engine, defaults=LAYERS)) as instance:
        yield instance


def test_sampling_comes_field_by_field_from_the_request_the_registry_and_the_model(
    chosen: Running,
):
    for asked in ({"seed": 5}, {"temperature": 1.4, "max_tokens": 20, "seed": 5}):
        response = chosen.post("/v1/chat/completions", {"messages": CHAT, **asked}).json()
        expected = chosen.model.generate(CHAT, drafter="none", **asked)  # type: ignore[arg-type]
        assert response["choices"][0]["message"]["content"] == expected.text
        settings = response["settings"]
        assert settings["top_p"] == {"value": 0.9, "source": "registry"}
        assert settings["repetition_penalty"] == {"value": 1.3, "source": "model"}
        assert settings["min_p"] == {"value": 0.0, "source": "fallback"}
        whose = "request" if "temperature" in asked else "registry"
        assert settings["temperature"] == {"value": asked.get("temperature", 0.8), "source": whose}
        assert response["usage"]["completion_tokens"] <= settings["max_tokens"]["value"]


def test_null_differs_from_values_that_disable_sampling_options(chosen: Running):
    asked = {"messages": CHAT, "seed": 5, "max_tokens": 3}
    null = chosen.post("/v1/chat/completions", {**asked, "temperature": None}).json()
    assert null["settings"]["temperature"]["source"] == "registry"
    off = chosen.post("/v1/chat/completions", {**asked, "top_k": -1}).json()
    assert off["settings"]["top_k"] == {"value": 0, "source": "request"}


def test_a_response_echoes_the_sampling_that_was_used(chosen: Running):
    response = chosen.post("/v1/responses", {"input": "this", "max_output_tokens": 3}).json()
    assert (response["temperature"], response["top_p"]) == (0.8, 0.9)
    reply = chosen.post("/v1/responses", {"input": "this", "temperature": 0}).json()
    assert (reply["temperature"], reply["top_p"]) == (0, 0.9)


def test_without_any_default_the_temperature_is_openais(server: Running):
    body = {"messages": CHAT, "max_tokens": 3}
    response = server.post("/v1/chat/completions", body).json()
    assert response["settings"]["temperature"] == {"value": 1.0, "source": "fallback"}


@pytest.mark.parametrize("drafter", ["none", "auto", "suffix", "ngram:min=1"])
@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_repetition_detection_ends_a_chat_with_finish_reason_repetition(
    policy: str, drafter: str, server: Running
):
    body = {
        "messages": CHAT,
        "temperature": 0,
        "max_tokens": 50,
        "logit_bias": ALWAYS,
        "speculation": {"drafter": drafter, "policy": policy},
        "return_token_ids": True,
        "repetition_detection": LOOP,
    }
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("repetition", [40] * 4)
    events = server.events("/v1/chat/completions", body)
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons[-1] == "repetition"
    received = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert received == choice["message"]["content"]


def test_repetition_detection_ends_completions_and_responses_too(server: Running):
    common = {"temperature": 0, "logit_bias": ALWAYS, "repetition_detection": LOOP}
    text = server.post("/v1/completions", {"prompt": "this", "max_tokens": 50, **common}).json()
    assert text["choices"][0]["finish_reason"] == "repetition"
    assert text["usage"]["completion_tokens"] == 4
    response = server.post("/v1/responses", {"input": "this", "max_output_tokens": 50, **common})
    assert response.json()["usage"]["output_tokens"] == 4
    assert response.json()["status"] == "completed"
