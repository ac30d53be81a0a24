"""Idle connections that take file descriptors, and a native library that crashes."""

import errno
import signal
import socket
import sys
import time
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.runtime.model import Model
from paceline.server import connections, page
from paceline.server.connections import connection_limit
from paceline.server.settings import Settings
from support.command import Command, served, started
from support.server import HTTP, Running, good, request, running
from support.tiny import SIZES, write_tiny
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

SETTINGS = Settings(reading_seconds=0.5)
SOON = Settings().header_seconds / 2
"""Seconds for operations without waiting; an idle connection is closed after twice that."""
BODY = {"prompt": "the rain in the rain", "max_tokens": 8, "temperature": 0}


def completion(**more: object) -> bytes:
    return request({**BODY, **more})


@contextmanager
def idle_connections(url: str, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections that send only `sent`; the oldest first."""
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(
                stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            )
            opened[-1].sendall(sent)
        yield opened


def stays_well(command: Command, seconds: float) -> None:
    """Check for a while that new connections get /health quickly and a completion eventually."""
    texts, url, headers = set[str](), command.url, {"connection": "close"}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        assert HTTP.get(url + "/health", headers=headers).status_code == 200
        assert time.monotonic() - start < SOON, "/health took long"
        reply = good(HTTP.post(url + "/v1/completions", json=BODY, headers=headers))
        texts.add(reply["choices"][0]["text"])
    assert len(texts) == 1


def test_idle_connections_beyond_the_descriptor_limit_make_room(tiny_gguf: Path, cache: Path):
    arguments = ("--port", "0", "--shutdown-timeout", "1")
    with served(tiny_gguf, cache, *arguments, open_files=64) as command:
        for sent in (b"", b"POST / HTTP/1.1\r\n", completion()[:-5]):
            with idle_connections(command.url, 100, sent):
                stays_well(command, 0.5)
        stays_well(command, 0.1)
        assert command.said.count("connections are open") == 1, command.said
        with (
            idle_connections(command.url, 100),
            idle_connections(command.url, 10, completion()[:-5]),
        ):
            start = time.monotonic()
            command.process.send_signal(signal.SIGTERM)
            assert command.end() == 0
            assert time.monotonic() - start < 8
    assert "Traceback" not in command.said


def test_a_response_does_not_wait_for_the_ack_of_its_headers(server: Running):
    """A client delays it by 40 ms on a connection that it has used for a while."""
    listening = server.server._socket
    assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_are_limited_by_the_file_descriptors(monkeypatch: pytest.MonkeyPatch):
    settings = Settings(connections=200)
    for free, one, two in ((None, 200, 200), (1000, 200, 200), (224, 200, 100), (30, 8, 8)):
        monkeypatch.setattr(connections, "free_descriptors", lambda free=free: free)
        assert (connection_limit(settings), connection_limit(settings, 2)) == (one, two)


def test_running_out_of_descriptors_logs_one_line_and_retries(
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


def test_the_oldest_idle_connection_is_closed_to_make_room(model: Model):
    health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with (
        running(model, Settings(connections=3)) as server,
        idle_connections(server.url, 3) as clients,
    ):
        clients[0].sendall(b"G")  # wins it no time
        clients[1].sendall(health)
        assert clients[1].recv(15) == b"HTTP/1.1 200 OK"
        with idle_connections(server.url, 2):  # those that were answered go last
            for client in (clients[0], clients[2]):
                with suppress(ConnectionError):
                    assert client.recv(1) == b""
            clients[1].sendall(health)
            assert b"HTTP/1.1 200 OK" in clients[1].recv(2**16) + clients[1].recv(2**16)


def test_a_connection_beyond_the_limit_gets_a_clear_error(tmp_path: Path, cache: Path):
    endless = write_tiny(tmp_path / "endless.gguf", sizes={**SIZES, "context": 200_000})
    request = completion(stream=True, ignore_eos=True, max_tokens=-1)
    arguments = ("--port", "0", "--connections", "4", "--shutdown-timeout", "0")
    with (
        served(endless, cache, *arguments) as command,
        idle_connections(command.url, 4, request) as busy,
    ):
        for connection in busy:
            assert connection.recv(15).startswith(b"HTTP/1.1 200")
        response = HTTP.get(command.url + "/health")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "too_many_connections"
        busy[0].close()
        until(lambda: HTTP.get(command.url + "/health").status_code == 200)
        until(lambda: "connections are open" in command.said)  # it is written by another thread


def test_a_client_that_does_not_read_the_end_of_a_response_is_disconnected(server: Running):
    path = max(Path(page.__file__).parent.iterdir(), key=lambda item: item.stat().st_size)
    with socket.socket() as client:
        server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.server.port))
        client.sendall(f"GET /{path.name} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * 4)
        client.settimeout(PATIENCE)
        time.sleep(1.5)
        read = b""
        with suppress(ConnectionError):
            while part := client.recv(2**16):
                read += part
        assert len(read) < 4 * path.stat().st_size, "it waited for the client"


SERVER = """
import ctypes, sys
from paceline.__main__ import main
{patch}
sys.argv = ["paceline", "serve", "--port", "0", *sys.argv[1:]]
sys.exit(main())
"""

PATCH = """
from paceline.engines.llamacpp import native
decode = native.NativeContext.decode
def fails(context, work):
    if any(tokens[:4] == [3, 250, 4, 250] for _, tokens, _ in work):
        {call}
    return decode(context, work)
native.NativeContext.decode = fails
"""
CALLS = {
    "an assert failed": "ctypes.CDLL(context.binding.library._name)"
    '.ggml_abort(b"ggml.c", 1234, b"GGML_ASSERT(%s) failed", b"planted")',
    "a bad address": "ctypes.string_at(8)",
}
"""Cause -> how a library crashes."""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("cause", CALLS)
def test_a_library_crash_ends_the_server_with_one_line_and_an_exit_code(
    tmp_path: Path, tiny_gguf: Path, cause: str
):
    options = ["--model", str(tiny_gguf)]

    def command_line(patch: str) -> list[str]:
        return [sys.executable, "-c", SERVER.format(patch=patch), *options]

    with started(command_line(PATCH.format(call=CALLS[cause])), tmp_path) as server:
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=BODY, timeout=PATIENCE).json()["choices"]
        with pytest.raises(httpx.HTTPError):
            httpx.post(url, json={**BODY, "prompt": [3, 250, 4, 250]}, timeout=PATIENCE)
        assert server.end() == 70
    assert (
        f"\npaceline: the engine's library has crashed: {cause}. Files of models and prompts are "
        "whole; start it again, or with another --engine\n"
    ) in server.said
    assert "Traceback" not in server.said
    with started(command_line(""), tmp_path) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=BODY, timeout=PATIENCE).json()["choices"] == answer
