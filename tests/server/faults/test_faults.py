"""Faults of a server under load: clients that disconnect, do not read, or send too large, too
long or invalid requests; a full cache, and an engine that fails.

Meanwhile two other clients send requests: each of their answers is the one that it gets alone.
Afterwards the server is idle, and every KV slot is free or in the prefix cache.
"""

import json
import random
import socket
import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from paceline.server.settings import Settings
from support.other_clients import ASKED, CHAT, LONG, TEXT, fault
from support.server import Running, head, request
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

SETTINGS = Settings(max_concurrent=8, queue=320, body_seconds=1.5, reading_seconds=1.5)


def clients_gone(server: Running) -> float:
    """Return the number of clients known to have left before their response ended."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if 'reason="client_gone"' in line)


def connected(server: Running, *, small: bool = False) -> socket.socket:
    """Open a connection; `small`: with a small receive buffer."""
    client = socket.socket()
    if small:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE)
    client.connect(("127.0.0.1", server.server.port))
    return client


def reset(connection: socket.socket) -> None:
    """Hang up like a machine that goes down: data in transit is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# -- clients ---------------------------------------------------------------------------------------


def test_clients_may_disconnect_at_any_moment(server: Running):
    drawn, before = random.Random(4), clients_gone(server)
    states = Counter[str]()

    def client(number: int) -> None:
        picked = random.Random(number)
        body = {**LONG, "prompt": "this is the one " * picked.choice((1, 8))}
        body |= {"stream": number % 3 == 0, "n": picked.choice((1, 1, 3))}
        text = request(body)
        whole = picked.random() < 0.7
        connection = connected(server)
        connection.sendall(text if whole else text[: picked.randrange(len(text))])
        time.sleep(picked.choice((0, 0.002, 0.05, 0.2)))
        if whole and body["stream"] and picked.random() < 0.5:
            connection.recv(100)
            states["read some"] += 1
        (reset if picked.random() < 0.5 else socket.socket.close)(connection)

    numbers = drawn.sample(range(1000), 90)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, numbers))
    until(lambda: server.scheduler.load.waiting == 0)  # the other clients continue
    assert clients_gone(server) - before > 30
    assert states["read some"] > 3


def test_clients_that_do_not_read_are_disconnected(
    server: Running, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", logger="paceline.server")
    body = {**LONG, "n": 4, "max_tokens": 150, "logprobs": 20, "stream": True}
    with ExitStack() as stack:
        # Else the system holds megabytes that nobody reads.
        server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stuck = [stack.enter_context(connected(server, small=True)) for _ in range(3)]
        for number, connection in enumerate(stuck):
            connection.sendall(request(body, f"X-Request-Id: stuck-{number}"))
        until(lambda: caplog.text.count("stuck-") == 3)  # said when a request is over
        for connection in stuck:
            read = b""
            with suppress(ConnectionError):
                while more := connection.recv(2**20):
                    read += more
            assert read.startswith(b"HTTP/1.1 200 ")
            assert b"[DONE]" not in read


def test_a_slow_reader_gets_the_whole_response(server: Running):
    body = {**LONG, "n": 8, "max_tokens": 60, "logprobs": 20, "stream": True}
    with connected(server) as connection:
        connection.sendall(request(body, "Connection: close"))
        read = b""
        while more := connection.recv(10_000):
            read += more
            time.sleep(0.01)
    assert read.count(b'"finish_reason":"length"') == 8
    assert b"data: [DONE]" in read


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/tokenize"])
def test_a_body_of_the_maximum_size_is_accepted(server: Running, path: str):
    """A text that is certainly too long is not even tokenized."""
    words = 1_500_000
    long = "word " * words
    bodies: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": long}]},
        "/v1/responses": {"input": long},
    }
    body = bodies.get(path, {"prompt": long})
    error = fault(server.post(path, body))
    assert error["code"] == "context_length_exceeded"
    assert words / 10 > error["n_prompt_tokens"] > error["n_ctx"] == 512


@pytest.mark.parametrize("kind", ["ids", "tokens", "prediction", "spaces", "messages", "stop"])
def test_large_fields_are_accepted_or_rejected_with_400(server: Running, kind: str):
    bodies: dict[str, dict[str, Any]] = {
        "ids": {"prompt": [5] * 2_000_000},
        "tokens": {"tokens": [5] * 500_000},
        "prediction": {
            "prompt": "a",
            "prediction": {"type": "content", "content": "word " * 1_400_000},
        },
        "spaces": {"prompt": "a", "prediction": {"type": "content", "content": " " * 3_000_000}},
        "messages": {"messages": [{"role": "user", "content": "a"}] * 100_000},
        "stop": {"prompt": "a", "max_tokens": 9, "stop": ["x" * 400_000] * 16},
    }
    path = {"messages": CHAT, "tokens": "/detokenize"}.get(kind, TEXT)
    response = server.post(path, bodies[kind])
    assert response.status_code == (200 if kind in ("stop", "tokens") else 400)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), b"400"),  # TLS
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (head("ten"), b"400"),
        (head("-1"), b"400"),
        (head(10) + b"{", b"408"),
        (head(10, "Transfer-Encoding: chunked") + b"5\r\nab\r\n", b"4"),
        (b"POST /v1/completions HTTP/9.9\r\nHost: localhost\r\n\r\n", b"4"),
        (request({**ASKED[0], "max_tokens": 2}, "Expect: 100-continue"), b"100"),
    ],
    ids=["tls", "header", "host", "length", "minus", "short", "chunk", "version", "expect"],
)
def test_invalid_http_requests_are_rejected(server: Running, sent: bytes, status: bytes):
    with connected(server) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).split()[1].startswith(status)


# -- the cache and the engine ----------------------------------------------------------------------


def error_of(response: httpx.Response, *, stream: bool, status: int) -> dict[str, Any]:
    """Return the error of a response, or the one that ends its stream."""
    if not stream or response.status_code != 200:
        return fault(response, status)
    assert response.text.endswith("data: [DONE]\n\n")
    error: dict[str, Any] = json.loads(response.text.split("data: ")[-2])["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpectedly_full_cache_returns_503(own_server: Running, stream: bool):
    """Sequences outside the scheduler hold slots, and its prefix cache has none to release."""
    engine = own_server.model.engine
    size = engine.block_size
    with ExitStack() as stack:
        while engine.free_slots > 6 * size:
            taken: Any = engine.open()
            stack.callback(taken.close)
            taken.reserve(min(engine.free_slots - 6 * size, engine.context_length))
        response = own_server.post(TEXT, {**LONG, "stream": stream})
        error = error_of(response, stream=stream, status=503)
    assert error["code"] == "cache_full"
    assert "shorten" in error["message"]
    assert response.status_code == 200 or response.headers["retry-after"]


@pytest.mark.parametrize(("error", "after"), [(RuntimeError("secret"), 1), (MemoryError(), 9)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_fails_only_one_request(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    after: int,
    stream: bool,
):
    """Passes with one prompt fail, starting with number `after`."""
    engine, marked, calls = server.model.engine, set[int](), 0
    step, prompt = engine.step, [70, 71, 72, 73, 74, 75, 76] * 2

    def fails(work: Any) -> Any:
        nonlocal calls
        marked.update(id(slots) for slots, block in work if [*block.tokens[:7]] == prompt[:7])
        if any(id(slots) in marked for slots, _ in work):
            calls += 1
            if calls >= after:
                raise error
        return step(work)

    monkeypatch.setattr(engine, "step", fails)
    body = {**LONG, "prompt": prompt, "cache_prompt": False, "stream": stream}
    response = server.post(TEXT, body)
    assert calls >= after
    assert f"{type(error).__name__} in" in caplog.text
    assert "secret" not in response.text + caplog.text
    assert (response.status_code == 200) is (stream and after > 1)  # something was told before
    assert error_of(response, stream=stream, status=500)["type"] == "server_error"
    assert 'paceline_requests_failed_total{reason="server_error"}' in server.get("/metrics").text
