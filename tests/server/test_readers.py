"""The threads that read bodies: what waits for what, and what the health check says of it."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from paceline.constraints.grammar import Grammars
from paceline.runtime.batching.request import Draining
from paceline.runtime.model import Model
from paceline.server.readers import Lane, Readers
from support.others import CHAT
from support.server import running
from support.waiting import PATIENCE, until

TURN = {"role": "user", "content": "this is the one"}
SHORT: dict[str, Any] = {"messages": [TURN], "max_tokens": 2}


@pytest.mark.parametrize("busy", [Lane.LONG, Lane.GRAMMAR])
def test_short_bodies_wait_neither_for_long_ones_nor_for_grammars(busy: Lane):
    readers, over = Readers(), threading.Event()

    async def run() -> str:
        long = [asyncio.ensure_future(readers.run(busy, over.wait, PATIENCE)) for _ in range(20)]
        short = await asyncio.wait_for(readers.run(Lane.SHORT, str, "short"), PATIENCE)
        assert not any(work.done() for work in long)
        over.set()
        await asyncio.gather(*long)
        return short

    assert asyncio.run(run()) == "short"
    assert readers.busy_seconds == 0


def test_work_that_waits_is_dropped_with_its_caller():
    readers, over, done = Readers(), threading.Event(), list[int]()

    async def run() -> None:
        first = asyncio.ensure_future(readers.run(Lane.LONG, over.wait, PATIENCE))
        waiting = asyncio.ensure_future(readers.run(Lane.LONG, done.append, 1))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0.01)
        over.set()
        await first
        await readers.run(Lane.LONG, done.append, 2)

    asyncio.run(run())
    assert done == [2]


def test_closed_readers_accept_nothing():
    readers = Readers()
    readers.close()
    with pytest.raises(Draining):
        asyncio.run(readers.run(Lane.SHORT, str))


def test_a_grammar_that_hangs_delays_no_chat_and_fails_the_health_check(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    over = threading.Event()
    monkeypatch.setattr(Grammars, "regex", lambda *_: over.wait(PATIENCE) and None)
    monkeypatch.setattr("paceline.server.api.info._STUCK_SECONDS", 0.05)
    with running(model) as server:
        assert server.get("/health").json() == {"status": "ok"}
        body = {**SHORT, "structured_outputs": {"regex": "a"}}
        client = threading.Thread(target=server.post, args=(CHAT, body))
        client.start()
        until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json() == {"status": "stuck"}
        assert server.post(CHAT, SHORT).status_code == 200
        long = {**SHORT, "messages": [{**TURN, "content": "word " * 5000}]}
        assert server.post(CHAT, long).json()["error"]["code"] == "context_length_exceeded"
        over.set()
        client.join(PATIENCE)
        until(lambda: server.get("/health").status_code == 200)


@pytest.mark.parametrize("field", ["structured_outputs", r"structured\u005foutputs"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_the_event_loop_compiles_no_grammar_however_its_field_is_written(
    model: Model, monkeypatch: pytest.MonkeyPatch, field: str, path: str
):
    threads = list[str]()
    regex = Grammars.regex

    def noted(self: Grammars, text: str) -> Any:
        threads.append(threading.current_thread().name)
        return regex(self, text)

    monkeypatch.setattr(Grammars, "regex", noted)
    prompt = '"prompt": "a"' if path != CHAT else '"messages": [{"role": "user", "content": "a"}]'
    content = f'{{{prompt}, "max_tokens": 4, "{field}": {{"regex": "[ab]+"}}}}'
    with running(model) as server:
        headers = {"content-type": "application/json"}
        response = httpx.post(server.url + path, content=content, headers=headers)
    assert response.status_code == 200, response.text
    assert [name.rpartition("_")[0] for name in threads] == ["paceline-grammar-reader"]
