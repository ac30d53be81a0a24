"""Faults inside a server under load: a full cache, an engine that fails, SIGTERM. As in
`test_faults.py` no other request is affected, and no slot is lost.
"""

import json
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.errors import CacheFull
from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.command import served
from support.others import LONG, TEXT, Others, answer, fault
from support.server import HTTP, Running, running
from support.waiting import leaves_after

pytestmark = pytest.mark.slow

SETTINGS = Settings(max_running=8)


# -- the cache and the engine ----------------------------------------------------------------------


def test_a_prompt_longer_than_the_cache(tiny_model: Model, cache: Path):
    files = tiny_model.files
    settings = EngineSettings(cache_tokens=128)
    engine = open_engine("llamacpp", files.path, files.context_length, settings)
    model = Model(files, engine)
    others = Others(model)
    with running(model, SETTINGS) as server, others.unharmed(server):
        error = fault(server.post(TEXT, {**LONG, "prompt": [5] * 200}))
        assert error["code"] == "context_length_exceeded"
        assert (error["n_ctx"], error["n_prompt_tokens"]) == (128, 200)
        # Each needs all of it, so they take turns; so do the others.
        with ThreadPoolExecutor(6) as pool:
            bodies = [{**LONG, "prompt": [5] * n} for n in (100, 101, 102, 103, 104, 105)]
            results = list(pool.map(lambda body: server.post(TEXT, body).json(), bodies))
        assert [item["usage"]["total_tokens"] for item in results] == [128] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_cache_that_admission_did_not_expect(server: Running, stream: bool):
    """Sequences outside of the scheduler hold slots."""
    engine = server.model.engine
    size = engine.block_size
    with ExitStack() as stack:
        while engine.free_slots > 6 * size:
            taken: Any = engine.open()
            stack.callback(taken.close)
            taken.reserve(min(engine.free_slots - 6 * size, engine.context_length))
        response = server.post(TEXT, {**LONG, "stream": stream})
        if stream and response.status_code == 200:
            error = json.loads(response.text.split("data: ")[-2])["error"]
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            error = fault(response, 503)
            assert response.headers["retry-after"]
        assert error["code"] == "cache_full"
        assert "shorten" in error["message"]


MARK = [70, 71, 72, 73, 74, 75, 76]
"""The beginning of a prompt for which the engine fails."""


class Breaking:
    """An engine whose calls with the marked sequence fail from number `after` on."""

    def __init__(self, engine: Any, after: int, error: Exception) -> None:
        self.step, self.error, self.after = engine.step, error, after
        self.marked: set[int] = set()
        self.calls = self.failed = 0

    def __call__(self, work: Any) -> Any:
        for slots, block in work:
            if list(block.tokens[: len(MARK)]) == MARK:
                self.marked.add(id(slots))
        if any(id(slots) in self.marked for slots, _ in work):
            self.calls += 1
            if self.calls >= self.after:
                self.failed += 1
                raise self.error
        return self.step(work)


@pytest.mark.parametrize(
    ("error", "after"), [(RuntimeError("secret"), 1), (MemoryError(), 2), (CacheFull("full"), 9)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_for_one_request(
    server: Running, monkeypatch: pytest.MonkeyPatch, error: Exception, after: int, stream: bool
):
    engine = server.model.engine
    breaking = Breaking(engine, after, error)
    monkeypatch.setattr(engine, "step", breaking)
    body = {**LONG, "prompt": MARK * 2, "cache_prompt": False, "stream": stream}
    response = server.post(TEXT, body)
    assert breaking.failed > 0
    assert "secret" not in response.text
    if stream and after > 1:  # something was told before
        assert response.status_code == 200
        assert response.text.endswith("data: [DONE]\n\n")
        received = json.loads(response.text.split("data: ")[-2])["error"]
    else:
        received = fault(response, 503 if isinstance(error, CacheFull) else 500)
    assert received["type"] == "server_error"


def test_an_engine_error_of_a_batched_call_is_retried_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    """A call of several that fails is made again for each alone, whichever it is."""
    engine = server.model.engine
    body = {**LONG, "prompt": MARK, "max_tokens": 12, "cache_prompt": False}
    plain = answer(server, body, stream=False)
    step, failures = engine.step, Counter[int]()
    for number in range(1, 11):
        left = number

        def failing(work: Any) -> Any:
            nonlocal left
            left -= len(work) > 1
            if not left and not failures[number]:  # noqa: B023
                failures[number] += 1  # noqa: B023
                raise RuntimeError("once")
            return step(work)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", failing)
            while not failures[number]:
                assert answer(server, body, stream=number % 2 == 0) == plain


# -- the end ---------------------------------------------------------------------------------------


def test_sigterm_under_load(tiny_gguf: Path, cache: Path, model: Model):
    """Every client has its whole answer or a clear error, whatever it was doing."""
    short = {**LONG, "max_tokens": 40}
    texts = {
        most: model.generate(
            LONG["prompt"], raw=True, max_tokens=most, ignore_eos=True, drafter="none"
        ).text
        for most in (40, 450)
    }
    arguments = ("--port", "0", "--at-once", "4", "--cache-tokens", "4096", "--grace", "0.5")
    with served(tiny_gguf, cache, *arguments) as command:
        begun = threading.Semaphore(0)
        url = command.url + TEXT

        def client(number: int) -> str:
            most = 40 if number < 4 else 450
            body = {**(short if number < 4 else LONG), "stream": number % 2 == 0}
            if number % 7 == 6:
                with suppress(httpx.TransportError):
                    HTTP.post(url, json=body, timeout=leaves_after(0.1))
                return "gone"
            lines = []
            try:
                with HTTP.stream("POST", url, json=body) as response:
                    for line in response.iter_lines():
                        begun.release()
                        lines.append(line.removeprefix("data: "))
            except httpx.ConnectError:  # it has ended
                return "refused"
            if response.status_code != 200 or not body["stream"]:
                received = json.loads("".join(lines))
            else:
                assert lines[-2:] == ["[DONE]", ""]
                chunks = [json.loads(line) for line in lines[:-2] if line]
                received = chunks.pop() if "error" in chunks[-1] else {"choices": [{}]}
                received["choices"] = [{"text": "".join(c["choices"][0]["text"] for c in chunks)}]
            if "error" in received:
                assert received["error"]["code"] == "draining"
                assert response.status_code in (200, 503)
                return "refused"
            assert received["choices"][0]["text"] == texts[most]
            return "answered"

        with ThreadPoolExecutor(42) as pool:
            asked = [pool.submit(client, number) for number in range(42)]
            begun.acquire()
            command.process.send_signal(signal.SIGTERM)
            counts = Counter(request.result() for request in asked)
        assert command.end() == 0
    assert counts["answered"] > 0
    assert counts["refused"] > 0
    assert counts["gone"] == 6
    assert "Traceback" not in command.said
