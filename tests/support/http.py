"""Fake servers on this machine: each is a handler, and a state that tests read and change."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A request as a server got it."""

    method: str
    path: str
    range: str | None
    authorization: str | None


class Handler(BaseHTTPRequestHandler):
    """Answers requests of one connection; `state` is what the test has."""

    @property
    def state(self) -> Any:
        return self.server.state  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def request_for(self, path: str) -> Request:
        headers = self.headers
        return Request(self.command, path, headers["Range"], headers["Authorization"])

    def first_byte(self) -> int:
        """Where the range begins that is requested."""
        return int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))

    def send(
        self,
        status: int,
        headers: Mapping[str, str],
        data: bytes = b"",
        cut: int | None = None,
        *,
        has_length: bool = True,
    ) -> None:
        """Send an answer; its connection breaks off after `cut` bytes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if has_length:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # the client has seen enough
                self.write(data[:cut])
        if cut is not None:
            self.close_connection = True

    def write(self, data: bytes) -> None:
        self.wfile.write(data)


@contextlib.contextmanager
def serving(handler: type[Handler]) -> Iterator[ThreadingHTTPServer]:
    """A server at a free port until the end of the block; `state` is to be set."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
