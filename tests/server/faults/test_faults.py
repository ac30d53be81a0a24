"""Faulty clients of a server under load: they disconnect, do not read, arrive in hundreds, or send
bodies that are too large, too long, or invalid.

Meanwhile two other clients send requests: each of their answers is the one that it gets alone.
Afterwards the server is idle, and every KV slot is free or in the prefix cache.
"""

import asyncio
import json
import random
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from paceline.server.settings import Settings
from paceline.storage.system import allow_open_files
from support.others import ASKED, CHAT, LONG, TEXT, Others, fault
from support.server import Running
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

SETTINGS = Settings(max_running=8, max_waiting=320, body_seconds=1.5, reading_seconds=1.5)


def clients_gone(server: Running) -> float:
    """How many clients are known to have left before their answer's end."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if 'reason="client_gone"' in line)


def head(length: int | str, *more: str) -> bytes:
    """The headers of a request for a completion."""
    lines = [f"POST {TEXT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def request(body: dict[str, Any], *more: str) -> bytes:
    text = json.dumps(body).encode()
    return head(len(text), *more) + text


def connected(server: Running, *, small: bool = False) -> socket.socket:
    """A connection; `small`: with room for little that is not read."""
    client = socket.socket()
    if small:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE)
    client.connect(("127.0.0.1", server.server.port))
    return client


def reset(connection: socket.socket) -> None:
    """Hang up as a machine does that goes down: what is on its way is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# -- clients ---------------------------------------------------------------------------------------


def test_clients_that_disconnect_at_any_moment(server: Running):
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
    until(lambda: server.scheduler.load.waiting == 0)  # the others go on asking
    assert clients_gone(server) - before > 30
    assert states["read some"] > 3


def test_clients_that_do_not_read_are_disconnected(
    server: Running, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", logger="paceline.server")
    body = {**LONG, "n": 4, "max_tokens": 150, "logprobs": 20, "stream": True}
    with ExitStack() as stack:
        # Else the system holds megabytes that nobody reads.
        server.server.http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
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


def test_a_client_that_reads_slowly_gets_all_of_it(server: Running):
    body = {**LONG, "n": 8, "max_tokens": 60, "logprobs": 20, "stream": True}
    with connected(server) as connection:
        connection.sendall(request(body, "Connection: close"))
        read = b""
        while more := connection.recv(10_000):
            read += more
            time.sleep(0.01)
    assert read.count(b'"finish_reason":"length"') == 8
    assert b"data: [DONE]" in read


@pytest.fixture
def open_files() -> Iterator[None]:
    """The command's limit in a shell that allows 512; this process has both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("open_files")
def test_five_hundred_connections(server: Running, others: Others):
    """Half of them ask for nothing, then all of them ask at once."""
    asked = request({**ASKED[0], "return_token_ids": True}, "Connection: close")

    async def ask(at: int) -> tuple[bytes, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
        await all_are_there.wait()
        writer.write(asked)
        received, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return received, json.loads(body)

    async def run() -> list[tuple[bytes, Any]]:
        asks = [asyncio.ensure_future(ask(at)) for at in range(500)]
        await asyncio.sleep(0.2)
        all_are_there.set()
        return await asyncio.gather(*asks)

    all_are_there = asyncio.Event()
    result = asyncio.run(run())
    statuses = Counter(received.split()[1] for received, _ in result)
    # They may all come during one call of the engine, with the two others in the queue.
    assert statuses[b"200"] >= SETTINGS.max_waiting - len(ASKED)
    assert statuses[b"200"] + statuses[b"429"] == 500
    for received, body in result:
        if b" 429 " in received:
            assert b"retry-after: " in received
            assert body["error"]["code"] == "queue_full"
        else:
            assert body["choices"][0]["text"] == others.expected[0]


# -- bodies ----------------------------------------------------------------------------------------

BIG = b'{"prompt": "' + b"word " * 2_000_000 + b'"}'
"""Ten megabytes."""


@pytest.mark.parametrize("chunked", [False, True])
def test_ten_megabytes(server: Running, chunked: bool):
    body = (BIG[at : at + 2**20] for at in range(0, len(BIG), 2**20)) if chunked else BIG
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + TEXT, content=body, headers=headers)
    assert fault(response, 413)["code"] == "body_too_large"


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/tokenize"])
def test_a_body_of_the_maximum_size(server: Running, path: str):
    """A text that is certainly too long is not tokenized."""
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


def test_only_the_beginning_of_a_text_that_is_too_long_is_tokenized(server: Running):
    text = "word " * 4_000
    tokens = len(server.server.service.tokenizer.encode(text))
    error = fault(server.post(TEXT, {"prompt": text}))
    assert error["code"] == "context_length_exceeded"
    assert error["n_ctx"] < error["n_prompt_tokens"] < tokens / 2


@pytest.mark.parametrize("kind", ["ids", "tokens", "prediction", "messages", "stop"])
def test_other_large_bodies(server: Running, kind: str):
    bodies: dict[str, dict[str, Any]] = {
        "ids": {"prompt": [5] * 2_000_000},
        "tokens": {"tokens": [5] * 500_000},
        "prediction": {
            "prompt": "a",
            "prediction": {"type": "content", "content": "word " * 1_400_000},
        },
        "messages": {"messages": [{"role": "user", "content": "a"}] * 100_000},
        "stop": {"prompt": "a", "max_tokens": 9, "stop": ["x" * 400_000] * 16},
    }
    path = {"messages": CHAT, "tokens": "/detokenize"}.get(kind, TEXT)
    response = server.post(path, bodies[kind])
    assert response.status_code == (200 if kind in ("stop", "tokens") else 400)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xc3"}',
        b'{"prompt": "\xed\xa0\x80"}',  # half of a pair, in what is nearly UTF-8
        b'{"prompt": "\\ud800"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "a"',
        b'{"prompt": "a\n"}',
        b'{"prompt": "a",}',
        b"{'prompt': 'a'}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' * 5000 + b"1" + b"}" * 5000,
        b"\x00" * 100,
        b"",
    ],
    ids=range(16),
)
def test_bodies_that_are_not_valid_json(server: Running, body: bytes):
    for path in (CHAT, TEXT):
        error = fault(server.post(path, body))
        assert error["code"] in ("invalid_json", None)
        assert len(error["message"]) < 300


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
def test_requests_that_are_not_valid_http(server: Running, sent: bytes, status: bytes):
    with connected(server) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).split()[1].startswith(status)
