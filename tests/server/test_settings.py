"""Sources of a request's sampling options over HTTP, and its repetition detection."""

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
    """A server whose model has recommended settings and a registry entry."""
    with running(Model(module_model.files, module_model.engine, defaults=LAYERS)) as instance:
        yield instance


def test_sampling_options_fall_back_per_field_to_registry_and_model(chosen: Running):
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


def test_null_differs_from_values_that_disable_sampling_options(chosen: Running, server: Running):
    asked = {"messages": CHAT, "seed": 5, "max_tokens": 3}
    null = chosen.post("/v1/chat/completions", {**asked, "temperature": None}).json()
    assert null["settings"]["temperature"]["source"] == "registry"
    off = chosen.post("/v1/chat/completions", {**asked, "top_k": -1}).json()
    assert off["settings"]["top_k"] == {"value": 0, "source": "request"}
    # Where nothing has a default of its own, this is OpenAI's.
    response = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}).json()
    assert response["settings"]["temperature"] == {"value": 1.0, "source": "fallback"}


def test_a_response_reports_the_effective_sampling_options(chosen: Running):
    response = chosen.post("/v1/responses", {"input": "this", "max_output_tokens": 3}).json()
    assert (response["temperature"], response["top_p"]) == (0.8, 0.9)
    reply = chosen.post("/v1/responses", {"input": "this", "temperature": 0}).json()
    assert (reply["temperature"], reply["top_p"]) == (0, 0.9)


ENDLESS = {"temperature": 0, "logit_bias": ALWAYS}
REASONS = {
    "/v1/chat/completions": ({"messages": CHAT}, '"finish_reason":"length"'),
    "/v1/responses": ({"input": CHAT}, '"incomplete_details":{"reason":"max_output_tokens"}'),
    "/v1/messages": ({"messages": CHAT}, '"stop_reason":"max_tokens"'),
}
"""Path -> body, and a part of the response if it was truncated."""


@pytest.mark.parametrize("path", REASONS)
def test_a_response_without_a_limit_ends_at_half_of_the_context(path: str, server: Running):
    body, reason = REASONS[path]
    for stream in (False, True):
        reply = server.post(path, {**body, **ENDLESS, "stream": stream})
        assert reason in reply.text
        assert '"max_tokens":{"value":256,"source":"fallback"}' in reply.text


def test_the_default_response_limit_can_be_set(module_model: Model):
    chat = {"messages": CHAT, **ENDLESS}
    with running(module_model, default_max_tokens=5) as server:
        for asked, count in ({}, 5), ({"max_tokens": 9}, 9), ({"max_tokens": -1}, None):
            reply = server.post("/v1/chat/completions", {**chat, **asked}).json()
            assert reply["choices"][0]["finish_reason"] == "length"
            usage = reply["usage"]
            assert usage["completion_tokens"] == (count or 512 - usage["prompt_tokens"])
        (model,) = server.get("/v1/models").json()["data"]
        assert model["defaults"]["max_tokens"] == 5


def test_repetition_detection_ends_a_response_in_each_api(server: Running):
    common = {"temperature": 0, "logit_bias": ALWAYS, "repetition_detection": LOOP}
    body = {"messages": CHAT, "max_tokens": 50, "return_token_ids": True, **common}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("repetition", [40] * 4)
    events = server.events("/v1/chat/completions", body)
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons[-1] == "repetition"
    received = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert received == choice["message"]["content"]
    text = server.post("/v1/completions", {"prompt": "this", "max_tokens": 50, **common}).json()
    assert text["choices"][0]["finish_reason"] == "repetition"
    assert text["usage"]["completion_tokens"] == 4
    response = server.post("/v1/responses", {"input": "this", "max_output_tokens": 50, **common})
    assert response.json()["usage"]["output_tokens"] == 4
    assert response.json()["status"] == "completed"
