"""Many concurrent requests over HTTP get the responses of each request alone.

Eight clients ask the real model for chats and completions in every way there is to ask, find
beginnings of their prompts in the cache or not, and go away now and then.
"""

import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.models import cache_dir
from paceline.models.names import DEFAULT_MODEL
from paceline.runtime.batching import batch
from paceline.runtime.model import Model
from paceline.runtime.result import Result
from support.command import Command, served
from support.other_clients import CHAT, TEXT
from support.scheduling import free_slots
from support.server import HTTP, Running, request, running
from support.waiting import until

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SYSTEM = (
    "You are a careful assistant who answers in few words. Quote where you can, repeat what you "
    "were told where that helps, and never invent anything. If you do not know something, say so. "
    "Numbers are written as digits, lists have one item a line."
)
QUESTIONS = [
    "Say this again, twice: the quick brown fox jumps over the lazy dog.",
    "What is the capital of France, and on which river does it lie?",
    "Write a line each about a cat, a dog and a crow. Begin with 🐈.",
]
PROMPTS: list[Any] = [
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    f"{SYSTEM}\n\n{SYSTEM[:150]}",
    *(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for question in QUESTIONS
    ),
]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 12}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 11, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 12, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.3, "stop": ["\n\n", "e,"]},
    {"temperature": 0, "json_schema": SCHEMA, "max_tokens": 40},
]
SPECULATIONS: list[dict[str, Any]] = [
    *({}, {}, {"drafter": "none"}),
    {"drafter": "suffix", "policy": "fixed", "max_block": 8},
    {"drafter": "ngram:min=1", "policy": "adaptive"},
    {"drafter": "ngram", "policy": "kelly", "max_block": 4},
    {"drafter": "table", "policy": "fixed", "max_block": 3},
    {"drafter": "suffix+table+ngram:min=1", "max_block": 16},
]
CACHES = [*({}, {}, {"cache_prompt": False}, {"cache_salt": "one"}, {"cache_salt": "two"})]


class LoadRequest(NamedTuple):
    prompt: Any
    options: dict[str, Any]
    """Everything that the response depends on, except the prompt."""
    way: dict[str, Any]
    """Options that must not change the response."""
    patience: int | None
    """Number of chunks before the client disconnects."""


def drawn(count: int, tokens: int) -> Iterator[LoadRequest]:
    """Yield the same requests every time."""
    choice = random.Random(5)
    for _ in range(count):
        prompt, options = choice.choice(PROMPTS), choice.choice(OPTIONS)
        way = {"stream": choice.random() < 0.6, "speculation": choice.choice(SPECULATIONS)}
        way |= choice.choice(CACHES)
        if choice.random() < 0.2:
            said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            way["prediction"] = {"type": "content", "content": said}
        leaves = way["stream"] and choice.random() < 0.2
        patience = choice.randrange(tokens // 2) if leaves else None
        yield LoadRequest(prompt, {"max_tokens": tokens, **options}, way, patience)


def parts(server: Running, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """The response, or the chunks of its stream."""
    with HTTP.stream("POST", server.url + path, json=body) as response:
        assert response.status_code == 200, response.read()
        if body["stream"]:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            yield from (json.loads(line.removeprefix("data: ")) for line in lines)
        else:
            yield json.loads(response.read())


def told(server: Running, asked: LoadRequest, alone: Result) -> dict[str, Any]:
    """Send a request, compare the response with the one alone, and return the final statistics."""
    body = {**asked.options, **asked.way, "return_token_ids": True}
    if schema := body.pop("json_schema", None):
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if isinstance(asked.prompt, str):
        path, body = TEXT, {**body, "prompt": asked.prompt, "logprobs": 2}
    else:
        path, body = CHAT, {**body, "messages": asked.prompt, "logprobs": True, "top_logprobs": 2}
    text, reason, last = "", None, dict[str, Any]()
    tokens, logprobs = list[int](), list[float]()
    with closing(parts(server, path, body)) as chunks:
        for last in islice(chunks, asked.patience):
            assert "error" not in last, last
            for choice in last["choices"]:
                message = choice.get("message") or choice.get("delta") or {}
                text += choice.get("text") or message.get("content") or ""
                tokens += choice["token_ids"] or []
                reason = choice["finish_reason"]
                stated = choice["logprobs"] or {}
                logprobs += stated.get("token_logprobs") or [
                    entry["logprob"] for entry in stated.get("content", ())
                ]
    assert alone.text.startswith(text), asked
    assert tokens == alone.token_ids[: len(tokens)], asked
    assert logprobs == [item.logprob for item in alone.logprobs[: len(logprobs)]], asked
    if asked.patience is None:
        assert (text, reason) == (alone.text, alone.finish_reason), asked
        assert len(logprobs) == len(tokens)
        assert reason == "stop" or tokens == alone.token_ids, asked
    return last


@pytest.mark.parametrize(
    ("count", "tokens"),
    [(36, 12), pytest.param(1000, 48, marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def test_every_response_under_load_matches_its_request_alone(
    count: int, tokens: int, real_model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch, "_PLAIN_CALLS", 0)  # drafters are asked however small the model is
    asked, plain, free = [*drawn(count, tokens)], dict[str, Result](), free_slots(real_model)
    for one in asked:
        if (key := f"{one.prompt} {one.options}") not in plain:
            ways: Any = {**one.options, "logprobs": 2, "drafter": "none"}
            plain[key] = real_model.without_history().generate(one.prompt, raw=True, **ways)
    with running(real_model.without_history()) as server, ThreadPoolExecutor(8) as clients:
        alone = [plain[f"{one.prompt} {one.options}"] for one in asked]
        ends = [*clients.map(lambda *each: told(server, *each), asked, alone)]
        server.rest()
        load = server.scheduler.load
        assert load.failed == 0
    assert free_slots(real_model) == free
    # It was a load, and what could go wrong was there to go wrong.
    whole = [end for end in ends if "speculation" in end]
    assert count / 2 < len(whole) < count
    assert load.calls < sum(end["speculation"]["steps"] for end in whole)
    assert any(end["usage"]["prompt_tokens_details"]["cached_tokens"] for end in whole)
    drafted = {name for end in whole for name in end["speculation"]["drafted_by"]}
    assert drafted >= {"ngram", "table", "prediction"}


_GROWTH = 200 << 20
"""Bytes: two contexts of llama.cpp's, with memory for calls of 256 rows, and parked prompts."""


def own_bytes(command: Command) -> int:
    """Return a server's resident memory without mapped files."""
    lines = Path(f"/proc/{command.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def asked(number: int) -> bytes:
    """Return a stream request with a unique prompt prefix."""
    return request({"prompt": f"{number} " + "word " * 150, "stream": True, "max_tokens": 100})


def test_memory_is_freed_after_unread_and_cancelled_streams():
    with served(DEFAULT_MODEL, cache_dir(), "--port", "0") as command:
        address = ("127.0.0.1", int(command.url.rpartition(":")[2]))
        HTTP.post(command.url + "/v1/completions", json={"prompt": "a", "max_tokens": 4})
        before = own_bytes(command)
        for _ in range(3):
            with ExitStack() as stack:
                for number in range(40):
                    client = stack.enter_context(socket.create_connection(address))
                    client.sendall(asked(number))
                time.sleep(2)
        until(lambda: own_bytes(command) < before + _GROWTH)
