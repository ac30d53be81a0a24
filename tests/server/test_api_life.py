"""Clients that leave, wait or do not read; failing engines; reader threads; shutdown."""

import asyncio
import re
import socket
import struct
import threading
from typing import Any

import httpx
import pytest

from paceline.constraints.grammar import Grammars
from paceline.runtime.batching import batch
from paceline.runtime.batching.request import Draining
from paceline.runtime.model import Model
from paceline.server.api import endpoint
from paceline.server.run import Server, request_log, serve
from paceline.server.service import Lane, Readers
from paceline.server.settings import Settings
from paceline.system.processes import Interrupt, Interrupted
from support.other_clients import CHAT, LONG, slowed
from support.server import HTTP, Running, request, running
from support.waiting import PATIENCE, until

JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "an answer"}}}


def sent(server: Running, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request and read nothing."""
    connection = socket.create_connection(("127.0.0.1", server.server.port))
    connection.sendall(request(body))
    return connection


def test_compilation_ends_when_its_client_disconnects(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    interrupts = list[Interrupt]()

    def ask(_worker: Any, _request: Any, _seconds: float, interrupt: Interrupt) -> None:
        interrupts.append(interrupt)
        until(lambda: interrupt.requested)
        raise Interrupted

    with running(model) as server:
        service = server.server.service
        assert service.grammars.json_object()
        processes = service.grammars._processes
        monkeypatch.setattr(processes, "_ask", ask)
        monkeypatch.setattr("paceline.server.api.endpoint._GRAMMAR_SECONDS", 2 * PATIENCE)
        connection = sent(server, {**LONG, "ignore_eos": False, "response_format": JSON})
        until(lambda: bool(interrupts))
        # It is reset: one that is only closed at once may be one that closes its sending side.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        until(lambda: not processes._turn.locked() and not service.readers._started)
    assert [interrupt.requested for interrupt in interrupts] == [True]


def test_a_response_over_its_time_limit_ends(slow_model: Model):
    with running(slow_model, Settings(timeout=0.6)) as server:
        response = server.post("/v1/completions", LONG)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "request_timeout"
        events = server.events("/v1/completions", LONG)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "request_timeout"
        assert len(events) > 3


def test_a_stuck_forward_pass_fails_the_health_check(
    slow_model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.server.api.info._STUCK_SECONDS", 0.05)
    step, back = slow_model.engine.step, threading.Event()

    def hangs(work: Any) -> Any:
        assert back.wait(PATIENCE)
        return step(work)

    with running(slow_model) as server, pytest.MonkeyPatch.context() as patch:
        assert server.get("/health").json() == {"status": "ok"}
        patch.setattr(slow_model.engine, "step", hangs)
        held = sent(server, LONG)
        until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json() == {"status": "stuck"}
        patch.undo()
        back.set()
        until(lambda: server.get("/health").status_code == 200)
        held.close()
        until(lambda: server.scheduler.load.running == 0)


def test_a_stream_reports_the_progress_of_a_long_prefill(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(endpoint, "_PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(batch, "_PREFILL_ROWS", 64)
    with slowed(model, 0.1), running(model) as server:
        prompt = {"prompt": [5] * 400, "max_tokens": 2, "stream": True, "cache_prompt": False}
        text = server.post("/v1/completions", prompt).text
        chat = {"messages": [{"role": "user", "content": "a" * 400}], "max_tokens": 2}
        long = {**chat, "stream": True, "cache_prompt": False}
        others = [server.post(path, long).text for path in ("/v1/chat/completions", "/v1/messages")]
        server.rest()
    for stream in (text, *others):
        assert ": prefill " in stream
        assert all("data: " in event for event in stream.rstrip("\n").split("\n\n"))
    lines = text.splitlines()
    progress = [line for line in lines if line.startswith(": prefill ")]
    done = [int(line.split()[2].removesuffix("/400")) for line in progress]
    assert done == sorted(set(done))
    assert 0 < done[0] < 400
    assert lines[-2] == "data: [DONE]"


def test_an_idle_stream_gets_keepalives(slow_model: Model):
    with running(slow_model, Settings(max_concurrent=1, keepalive_seconds=0.05)) as server:
        first = sent(server, LONG)
        until(lambda: server.scheduler.load.running == 1)
        with HTTP.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True, "max_tokens": 3}
        ) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keepalive"
            first.close()
            rest = [line for line in lines if not line.startswith(":")]
        assert rest[1::2] == [""] * 5  # no blank line after a comment: clients read it as an event
        rest = rest[::2]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 5  # three tokens, the end, [DONE]


def test_the_log_has_paths_but_no_prompts(own_server: Running, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG", logger="paceline")
    for path, body in [
        ("/v1/completions", {"prompt": "hushhush", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "hushhush", "max_tokens": -9}),
        ("/v1/chat/completions", {"messages": [{"role": "hushhush"}]}),
        ("/v1/responses", {"input": "hushhush", "previous_response_id": "hush"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hushhush"}], "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "hushhush"}]}),
        ("/tokenize", {"prompt": "hushhush"}),
    ]:
        own_server.post(path, body, headers={"x-request-id": "number-1"})
    own_server.get("/v1/models/none%0Aforged")
    own_server.get("/v1/models")  # successful ones of a browser or of a monitor are left out
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert re.fullmatch(r"POST /v1/completions 200 \d+\.\d{3} s number-1", lines[0])
    assert lines[-1].startswith("GET /v1/models/none%0Aforged 404 ")
    assert "hush" not in caplog.text


def test_each_request_is_a_line_on_stderr_unless_quiet(
    own_server: Running, capsys: pytest.CaptureFixture[str]
):
    lines = ""

    def requested(count: int) -> bool:
        nonlocal lines
        lines += capsys.readouterr().err
        return lines.count("\n") >= count

    with request_log(quiet=False):
        own_server.post("/v1/tokenize", {"prompt": "a"})
        until(lambda: requested(1))
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/tokenize 200 [\d.]+ s req-\w+\n", lines)
    with request_log(quiet=True):
        own_server.post("/v1/tokenize", {"prompt": "a"})
        own_server.get("/none")
    assert capsys.readouterr().err == ""


def test_the_grammar_compiler_is_ready_before_the_first_request(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    results = list[Server]()
    monkeypatch.setattr(Server, "run", lambda server, **_: results.append(server))
    serve(model, Settings())
    monkeypatch.setattr("llguidance.LLTokenizer", None)  # what takes long is made by now
    (server,) = results
    assert server.service.grammars.json_schema({"const": "a"}).forced(9)
    server._socket.close()


TURN = {"role": "user", "content": "this is the one"}
SHORT: dict[str, Any] = {"messages": [TURN], "max_tokens": 2}


@pytest.mark.parametrize("busy", [Lane.LONG, Lane.GRAMMAR])
def test_short_requests_wait_for_neither_long_ones_nor_grammars(busy: Lane):
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


def test_queued_work_is_dropped_with_its_caller():
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


def test_a_hanging_grammar_delays_no_chat_and_fails_the_health_check(
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
def test_the_event_loop_never_compiles_a_grammar(
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
