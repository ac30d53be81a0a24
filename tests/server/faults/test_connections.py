"""Connections that take descriptors and do nothing: a server keeps answering others."""

import errno
import json
import resource
import signal
import socket
import threading
import time
from asyncio.selector_events import BaseSelectorEventLoop
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.runtime.model import Model
from paceline.server import page
from paceline.server.settings import Settings
from support.command import Command, served
from support.server import HTTP, Running, running
from support.tiny import SIZES, write_tiny
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

SETTINGS = Settings(reading_seconds=0.5)
SOON = Settings().header_seconds / 2
"""Seconds for what waits for nothing: an idle connection is closed after twice as many."""
INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
BODY = {"prompt": "the rain in the rain", "max_tokens": 8, "temperature": 0}


@contextmanager
def idle_connections(url: str, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that send `sent` and then nothing; the oldest first."""
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = socket.create_connection((host, int(port)), PATIENCE)
            connections.append(stack.enter_context(connection))
            if sent:
                connection.sendall(sent)
        yield connections


@contextmanager
def many_files() -> Iterator[None]:
    """This process may have the other ends of thousands of connections open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_bytes(command: Command) -> int:
    lines = Path(f"/proc/{command.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def stays_well(command: Command, seconds: float, **more: str) -> None:
    """For some time, /health comes soon and an answer at all, on new connections."""
    texts, url, headers = set[str](), command.url, {"connection": "close"}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        assert HTTP.get(url + "/health", headers=headers).status_code == 200
        assert time.monotonic() - start < SOON, "/health took long"
        response = HTTP.post(url + "/v1/completions", json={**BODY, **more}, headers=headers)
        assert response.status_code == 200, response.text
        texts.add(response.json()["choices"][0]["text"])
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("open_files", "count", "sent"),
    [(64, 100, b""), (64, 100, b"POST / HTTP/1.1\r\n"), (1024, 5000, b"")],
    ids=["64 files", "64 files, a part of a head", "1024 files"],
)
def test_idle_connections_beyond_the_descriptors_leave_room_for_others(
    open_files: int, count: int, sent: bytes, tiny_gguf: Path, cache: Path
):
    with many_files(), served(tiny_gguf, cache, "--port", "0", open_files=open_files) as command:
        stays_well(command, 0.5)
        before = resident_bytes(command)
        with idle_connections(command.url, count, sent):
            stays_well(command, 2)
            grown = resident_bytes(command) - before
        stays_well(command, 0.5)
        text = command.said
    assert text.count("connections are open") == 1, text
    assert len([line for line in text.splitlines() if " POST /v1/" not in line]) < 10, text
    assert grown < 100e6, f"{grown / 1e6:.0f} MB for connections"


def test_idle_connections_to_a_server_of_several_models_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".lmstudio" / "models" / "owner" / "repo"
    folder.mkdir(parents=True)
    write_tiny(folder / "tiny.gguf")
    name = "lmstudio/owner/repo/tiny.gguf"
    with served(Path(name), tmp_path, "--all", "--port", "0", open_files=64) as command:
        stays_well(command, 0.1, model=name)
        with idle_connections(command.url, 100):
            stays_well(command, 2, model=name)
    assert "Traceback" not in command.said
    assert command.said.count("connections are open") == 1, command.said


def test_a_flood_of_connections_leaves_room_for_others(tiny_gguf: Path, cache: Path):
    """Clients that connect again as soon as they are closed."""
    over = threading.Event()

    def flood(url: str) -> int:
        opened = 0
        host, port = url.removeprefix("http://").split(":")
        held: deque[socket.socket] = deque()
        while not over.is_set() and opened < 30_000:
            held.append(socket.create_connection((host, int(port)), PATIENCE))
            opened += 1
            if len(held) > 300:
                held.popleft().close()
        for connection in held:
            connection.close()
        return opened

    with served(tiny_gguf, cache, "--port", "0", open_files=256) as command:
        with ThreadPoolExecutor(1) as pool:
            flooding = pool.submit(flood, command.url)
            try:
                stays_well(command, 2)
            finally:
                over.set()
            opened = flooding.result()
        stays_well(command, 0.5)
    assert opened > 1000
    assert command.said.count("connections are open") == 1, command.said


def test_sigterm_ends_a_server_with_idle_connections_in_its_grace_period(
    tiny_gguf: Path, cache: Path
):
    arguments = ("--port", "0", "--grace", "1")
    with served(tiny_gguf, cache, *arguments, open_files=64) as command:
        body = completion("1.1")[:-5]
        with idle_connections(command.url, 100), idle_connections(command.url, 10, body):
            start = time.monotonic()
            command.process.send_signal(signal.SIGTERM)
            assert command.end() == 0
            assert time.monotonic() - start < 8
    assert "Traceback" not in command.said


def test_an_accept_without_a_descriptor_is_one_line_and_a_new_attempt(
    own_server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    original, failed = BaseSelectorEventLoop.sock_accept, []

    async def accept(loop: BaseSelectorEventLoop, listening: socket.socket) -> Any:
        if len(failed) < 5:
            failed.append(listening)
            raise OSError(errno.EMFILE, "Too many open files")
        return await original(loop, listening)

    monkeypatch.setattr(BaseSelectorEventLoop, "sock_accept", accept)
    url = own_server.url
    with idle_connections(url, 5):  # the first of them is accepted by the call before
        assert HTTP.get(url + "/health", headers={"connection": "close"}).is_success
    assert len(failed) == 5
    assert caplog.text.count("Too many open files") == 1


def test_the_connection_that_was_first_without_a_request_makes_room(model: Model):
    with running(model, Settings(max_connections=3)) as server:
        address = ("127.0.0.1", server.server.port)
        with ExitStack() as stack:
            clients = []
            for number in range(4):
                client = stack.enter_context(socket.create_connection(address, PATIENCE))
                clients.append(client)
                if number == 2:
                    clients[0].sendall(b"G")  # wins it no time
                    time.sleep(0.1)
            clients[0].settimeout(PATIENCE)
            with suppress(ConnectionError):
                assert clients[0].recv(1) == b""
            for client in clients[1:]:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_bodies_that_never_end_make_room_for_others(tiny_gguf: Path, cache: Path):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"prompt'
    )
    with (
        served(tiny_gguf, cache, "--port", "0", open_files=64) as command,
        idle_connections(command.url, 100, head),
    ):
        stays_well(command, 2)


@pytest.fixture(scope="module")
def endless_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("endless") / "endless.gguf"
    return write_tiny(path, sizes={**SIZES, "context": 200_000})


def test_a_connection_beyond_busy_ones_gets_one_clear_error(endless_gguf: Path, cache: Path):
    body = json.dumps({"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": -1})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    arguments = ("--port", "0", "--connections", "4", "--grace", "0")
    with (
        served(endless_gguf, cache, *arguments) as command,
        idle_connections(command.url, 4, head.encode()) as busy,
    ):
        for connection in busy:
            connection.settimeout(PATIENCE)
            assert connection.recv(15).startswith(b"HTTP/1.1 200")
        for _ in range(3):
            start = time.monotonic()
            response = HTTP.get(command.url + "/health")
            assert time.monotonic() - start < SOON
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "too_many_connections"
        busy[0].close()
        deadline = time.monotonic() + PATIENCE
        while HTTP.get(command.url + "/health").status_code != 200:
            assert time.monotonic() < deadline, "the place of a closed connection stays taken"
            time.sleep(0.05)
        until(lambda: "connections are open" in command.said)  # it is written by another thread
    assert command.said.count("connections are open") == 1, command.said


def completion(version: str, **more: object) -> bytes:
    body = json.dumps({**BODY, **more})
    return (
        f"POST /v1/completions HTTP/{version}\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_gets_its_answer(
    server: Running, version: str, stream: bool
):
    with socket.create_connection(("127.0.0.1", server.server.port), PATIENCE) as client:
        client.sendall(completion(version, stream=stream, max_tokens=200, ignore_eos=True))
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client).replace(INTERIM, b"")
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    assert b"[DONE]" in answer if stream else b'"finish_reason":"length"' in answer


def test_clients_that_left_while_the_event_loop_stalled_take_no_more_time(slow_model: Model):
    """Their requests and the ends of their connections are handled together, as those of a client
    that closes its sending side alone, which still gets its answer."""
    long = completion("1.1", max_tokens=400, ignore_eos=True, speculation={"drafter": "none"})
    with running(slow_model, Settings(max_running=1)) as server, ExitStack() as stack:
        goes_on = threading.Event()
        server.server.http._loop.call_soon_threadsafe(  # type: ignore[union-attr]
            goes_on.wait, PATIENCE
        )
        address = ("127.0.0.1", server.server.port)
        waiting = stack.enter_context(socket.create_connection(address, PATIENCE))
        for client in (waiting, *(socket.create_connection(address, PATIENCE) for _ in range(3))):
            client.sendall(long)
            if client is not waiting:
                client.close()
        waiting.shutdown(socket.SHUT_WR)
        goes_on.set()
        answer = read_all(waiting)
        server.rest()
        assert server.scheduler.load.calls < 2 * 400
    interim, _, final = answer.rpartition(INTERIM)
    assert interim
    assert final.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":"length"' in final


def test_pipelined_requests_before_the_sending_side_is_closed_are_answered(server: Running):
    with socket.create_connection(("127.0.0.1", server.server.port), PATIENCE) as client:
        client.sendall(completion("1.1") * 3 + b"GET /health HTTP/1.1\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 200 ") == 3


def test_a_client_that_closes_in_its_body_gets_no_answer_and_its_connection_ends(server: Running):
    with socket.create_connection(("127.0.0.1", server.server.port), PATIENCE) as client:
        client.sendall(completion("1.1")[:-5])
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""


def test_the_connection_of_a_client_that_does_not_read_the_end_of_its_answer_is_closed(
    server: Running,
):
    path = max(Path(page.__file__).parent.iterdir(), key=lambda item: item.stat().st_size)
    with socket.socket() as client:
        server.server.http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.server.port))
        client.sendall(f"GET /{path.name} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * 4)
        client.settimeout(PATIENCE)
        time.sleep(1.5)
        with suppress(ConnectionError):
            assert len(read_all(client)) < 4 * path.stat().st_size, "it waited for the client"


def read_all(client: socket.socket) -> bytes:
    parts = b""
    while part := client.recv(2**16):
        parts += part
    return parts
