"""Forced calls of the default model, which was not trained on tools: whatever the limit of tokens,
an answer has complete calls and nothing else.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.runtime.model import Model
from support.server import Running, running

pytestmark = pytest.mark.real_model

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}
CALL = ("get_weather", {"city": "Paris"})
BODY: dict[str, Any] = {
    "messages": [ASKED],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "temperature": 0,
}


@pytest.fixture(scope="module")
def shipped(real_model: Model) -> Iterator[Running]:
    with running(real_model) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_answer_of_the_default_model_is_one_complete_call_or_none(
    shipped: Running, stream: bool
):
    counts = []
    # A stream and a response at once cut the call at every second place.
    for most in (4, 20, 25, 27, 29, 31, 33, 60) if stream else (1, 14, 24, 26, 28, 30, 32, 60):
        body = {**BODY, "max_tokens": most}
        if stream:
            messages = [event["choices"] for event in shipped.events(PATH, body)[:-1]]
            deltas = [choice["delta"] for choices in messages for choice in choices]
        else:
            deltas = [shipped.post(PATH, body).json()["choices"][0]["message"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "", most
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
        names = [part["name"] for part in parts if "name" in part]
        arguments = "".join(part["arguments"] for part in parts)
        calls = [(name, json.loads(arguments)) for name in names]
        assert calls in ([], [CALL]), most
        counts.append(len(calls))
    assert counts == sorted(counts)
    assert counts[-1] == 1
