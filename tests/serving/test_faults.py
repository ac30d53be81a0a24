"""What clients, bodies, the engine and the system do wrong to a server that others use.

While each of it goes on, two clients ask all the time: every answer of theirs is the one they get
alone. After each the server is at rest and every block of the cache is free, all are counted.
"""

import asyncio
import json
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.errors import CacheFull
from paceline.runtime import Model
from paceline.serving.command import allow_open_files
from paceline.serving.settings import Settings
from support.command import served
from support.server import HTTP, Running, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {
    "prompt": "this is the one",
    "max_tokens": 450,
    "ignore_eos": True,
    "temperature": 0,
    "speculation": {"drafter": "none"},
}
"""1.4 seconds at least: see `one_server`."""
OTHERS: list[dict[str, Any]] = [
    {"prompt": "the rain in the rain", "max_tokens": 12, "temperature": 0},
    {"prompt": "one and two and one", "max_tokens": 12, "temperature": 1.1, "seed": 5},
]
PATIENCE = Settings(most_running=8, most_waiting=320, body_seconds=0.5, reading_seconds=1)


@pytest.fixture(scope="module")
def expected(module_model: Model) -> list[str]:
    """What the others get alone."""
    found = []
    for body in OTHERS:
        options = {name: value for name, value in body.items() if name != "prompt"}
        found.append(module_model.generate(body["prompt"], raw=True, drafter="none", **options))
    return [each.text for each in found]


@pytest.fixture(scope="module")
def one_server(module_model: Model, expected: list[str]) -> Iterator[Running]:
    """Its calls take 3 ms at least, so that there is time for faults."""
    step = module_model.engine.step

    def slowly(work: Any) -> Any:
        time.sleep(0.003)
        return step(work)

    with pytest.MonkeyPatch.context() as patch, running(module_model, PATIENCE) as made:
        patch.setattr(module_model.engine, "step", slowly)
        yield made


@pytest.fixture
def server(one_server: Running, expected: list[str]) -> Iterator[Running]:
    with unharmed(one_server, expected):
        yield one_server


@contextmanager
def unharmed(server: Running, expected: list[str]) -> Iterator[None]:
    """Others ask all the while, and in the end all blocks are counted."""
    engine, prompts = server.model.engine, server.scheduler.prompts
    free = engine.free_slots
    over = threading.Event()

    def ask(at: int) -> set[str]:
        found = set[str]()
        while not (found and over.is_set()):
            found.add(answer(server, OTHERS[at], stream=bool(at)))
        return found

    with ThreadPoolExecutor(len(OTHERS)) as pool:
        asking = [pool.submit(ask, at) for at in range(len(OTHERS))]
        try:
            yield
        finally:
            over.set()
    assert [each.result() for each in asking] == [{text} for text in expected]
    server.rest()
    assert server.get("/health").status_code == 200

    def all_free() -> bool:
        # At rest: the engine's thread, whose cache it is, waits for somebody to ask.
        prompts.clear()
        return bool(engine.free_slots == free)

    until(all_free)


def answer(server: Running, body: dict[str, Any], *, stream: bool) -> str:
    """The text; who finds the queue full comes again."""
    while (response := server.post(TEXT, {**body, "stream": stream})).status_code == 429:
        time.sleep(0.05)
    assert response.status_code == 200, response.text
    if not stream:
        return str(response.json()["choices"][0]["text"])
    *events, end = response.text.removeprefix("data: ").rstrip("\n").split("\n\ndata: ")
    assert end == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def fault(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """OpenAI's error object."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


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
    made = socket.socket()
    if small:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(20)
    made.connect(("127.0.0.1", server.server.port))
    return made


def reset(connection: socket.socket) -> None:
    """Hang up as a machine does that goes down: what is on its way is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# -- clients ---------------------------------------------------------------------------------------


def test_clients_that_vanish_at_any_moment(server: Running):
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
    until(lambda: server.scheduler.load.waiting == 0, 2)  # the others never wait for long
    assert clients_gone(server) - before > 30
    assert states["read some"] > 3


def test_clients_that_do_not_read_are_hung_up_on(server: Running, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="paceline.serving")
    body = {**LONG, "n": 4, "max_tokens": 150, "logprobs": 20, "stream": True}
    with ExitStack() as stack:
        # Else the system holds megabytes that nobody reads.
        server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stuck = [stack.enter_context(connected(server, small=True)) for _ in range(3)]
        for number, connection in enumerate(stuck):
            connection.sendall(request(body, f"X-Request-Id: stuck-{number}"))
        until(lambda: caplog.text.count("stuck-") == 3, 20)  # said when a request is over
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
    """As many as the command allows, in a shell that allows 512; here they have both their ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("open_files")
def test_five_hundred_connections(server: Running, expected: list[str]):
    """Half of them ask for nothing, then all of them ask at once."""
    asked = request({**OTHERS[0], "return_token_ids": True}, "Connection: close")

    async def ask(at: int) -> tuple[bytes, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
        await all_are_there.wait()
        writer.write(asked)
        told, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return told, json.loads(body)

    async def run() -> list[tuple[bytes, Any]]:
        asks = [asyncio.ensure_future(ask(at)) for at in range(500)]
        await asyncio.sleep(0.2)
        all_are_there.set()
        return await asyncio.gather(*asks)

    all_are_there = asyncio.Event()
    found = asyncio.run(run())
    statuses = Counter(told.split()[1] for told, _ in found)
    assert statuses[b"200"] >= PATIENCE.most_running + PATIENCE.most_waiting
    assert statuses[b"200"] + statuses[b"429"] == 500
    for told, body in found:
        if b" 429 " in told:
            assert b"retry-after: " in told
            assert body["error"]["code"] == "queue_full"
        else:
            assert body["choices"][0]["text"] == expected[0]


# -- bodies ----------------------------------------------------------------------------------------

BIG = b'{"prompt": "' + b"word " * 2_000_000 + b'"}'
"""Ten megabytes."""


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/tokenize"])
def test_ten_megabytes(server: Running, path: str, chunked: bool):
    body = (BIG[at : at + 2**20] for at in range(0, len(BIG), 2**20)) if chunked else BIG
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + path, content=body, headers=headers)
    assert fault(response, 413)["code"] == "body_too_large"


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/tokenize"])
def test_as_large_a_body_as_may_be(server: Running, path: str):
    """What is too long whatever its tokens are is not made into tokens."""
    long = "word " * 1_500_000
    bodies: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": long}]},
        "/v1/responses": {"input": long},
    }
    body = bodies.get(path, {"prompt": long})
    started = time.monotonic()
    error = fault(server.post(path, body))
    assert time.monotonic() - started < 2
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 512


@pytest.mark.parametrize("kind", ["ids", "prediction", "messages", "stop"])
def test_other_large_bodies(server: Running, kind: str):
    bodies: dict[str, dict[str, Any]] = {
        "ids": {"prompt": [5] * 2_000_000},
        "prediction": {
            "prompt": "a",
            "prediction": {"type": "content", "content": "word " * 1_400_000},
        },
        "messages": {"messages": [{"role": "user", "content": "a"}] * 100_000},
        "stop": {"prompt": "a", "max_tokens": 9, "stop": ["x" * 400_000] * 16},
    }
    path = CHAT if kind == "messages" else TEXT
    started = time.monotonic()
    response = server.post(path, bodies[kind], timeout=60)
    assert response.status_code == (200 if kind == "stop" else 400)
    assert time.monotonic() - started < 5


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
def test_bodies_that_are_no_text_or_no_json(server: Running, body: bytes):
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
        (request({**OTHERS[0], "max_tokens": 2}, "Expect: 100-continue"), b"100"),
    ],
    ids=["tls", "header", "host", "length", "minus", "short", "chunk", "version", "expect"],
)
def test_requests_that_are_no_http(server: Running, sent: bytes, status: bytes):
    with connected(server) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).split()[1].startswith(status)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_longer_than_the_context(server: Running, stream: bool):
    long = "word " * 600
    body = {"messages": [{"role": "user", "content": long}], "prompt": long, "input": long}
    with ThreadPoolExecutor(8) as pool:
        paths = [CHAT, TEXT, "/v1/responses"] * 8
        for response in pool.map(lambda p: server.post(p, {**body, "stream": stream}), paths):
            error = fault(response)
            assert error["code"] == "context_length_exceeded"
            assert error["n_ctx"] == 512 < error["n_prompt_tokens"]


# -- the cache and the engine ----------------------------------------------------------------------


def test_a_prompt_longer_than_the_cache(tiny_model: Model, cache: Path, expected: list[str]):
    files = tiny_model.files
    settings = EngineSettings(cache_tokens=128)
    engine = open_engine("openvino", files.path, files.context_length, settings)
    with running(Model(files, engine), PATIENCE) as server, unharmed(server, expected):
        error = fault(server.post(TEXT, {**LONG, "prompt": [5] * 200}))
        assert error["code"] == "context_length_exceeded"
        assert (error["n_ctx"], error["n_prompt_tokens"]) == (128, 200)
        # Each needs all of it, so they take turns; so do the others.
        with ThreadPoolExecutor(6) as pool:
            bodies = [{**LONG, "prompt": [5] * n} for n in (100, 101, 102, 103, 104, 105)]
            found = list(pool.map(lambda body: server.post(TEXT, body).json(), bodies))
        assert [each["usage"]["total_tokens"] for each in found] == [128] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_cache_that_is_full_all_the_same(server: Running, stream: bool):
    """Somebody holds slots of whom the scheduler knows nothing."""
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
"""The beginning of the prompt that the engine cannot bear."""


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
def test_an_engine_that_fails_for_one(
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
        told = json.loads(response.text.split("data: ")[-2])["error"]
    else:
        told = fault(response, 503 if isinstance(error, CacheFull) else 500)
    assert told["type"] == "server_error"


def test_an_engine_that_fails_once_harms_nobody_in_company(
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
                with suppress(httpx.ReadTimeout):
                    HTTP.post(url, json=body, timeout=0.1)
                return "gone"
            lines = []
            try:
                with HTTP.stream("POST", url, json=body, timeout=60) as response:
                    for line in response.iter_lines():
                        begun.release()
                        lines.append(line.removeprefix("data: "))
            except httpx.ConnectError:  # it has ended
                return "refused"
            if response.status_code != 200 or not body["stream"]:
                told = json.loads("".join(lines))
            else:
                assert lines[-2:] == ["[DONE]", ""]
                chunks = [json.loads(line) for line in lines[:-2] if line]
                told = chunks.pop() if "error" in chunks[-1] else {"choices": [{}]}
                told["choices"] = [{"text": "".join(c["choices"][0]["text"] for c in chunks)}]
            if "error" in told:
                assert told["error"]["code"] == "draining"
                assert response.status_code in (200, 503)
                return "refused"
            assert told["choices"][0]["text"] == texts[most]
            return "answered"

        with ThreadPoolExecutor(42) as pool:
            asked = [pool.submit(client, number) for number in range(42)]
            begun.acquire()
            command.process.send_signal(signal.SIGTERM)
            found = Counter(each.result() for each in asked)
        assert command.end(5) == 0
    assert found["answered"] > 0
    assert found["refused"] > 0
    assert found["gone"] == 6
    assert "Traceback" not in command.said
