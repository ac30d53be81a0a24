"""A package index on this machine: a project's page, its files in ranges, and how it can fail."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROJECT = "tiny-llm"


class Asked(NamedTuple):
    """A request."""

    path: str
    range: str | None
    authorization: str | None


@dataclass
class FakeIndex:
    """What the index has, how it fails, and what was asked of it."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    as_json: bool = False
    """Whether the page is JSON (PEP 691) instead of HTML (PEP 503)."""
    digest: str | None = ""
    """SHA-256 of the files by the page; empty: that of their bytes; None: the page has none."""
    cut_after: list[int] = field(default_factory=list)
    """Bytes after which each of the next downloads breaks off."""
    statuses: list[int] = field(default_factory=list)
    """HTTP statuses of the next downloads; 200: as usual."""
    ranges: bool = True
    """Whether a part of a file can be asked for."""
    has_lengths: bool = True
    """Whether a file is sent with its length."""
    page: bytes | None = None
    """What is sent instead of the project's page."""
    moved_to: str | None = None
    """Address to which downloads are redirected."""
    credentials: str | None = None
    """`user:password` that every request needs."""

    @property
    def simple(self) -> str:
        """Address of the index."""
        return f"{self.url}/simple"

    def downloads(self) -> list[Asked]:
        """Requests for the bytes of files."""
        return [each for each in self.asked if each.path.startswith("/files/")]


@contextlib.contextmanager
def serving() -> Iterator[FakeIndex]:
    """An index that answers until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    index = FakeIndex(f"http://127.0.0.1:{server.server_port}")
    server.index = index  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_only(monkeypatch: pytest.MonkeyPatch, home: Path, **variables: str) -> None:
    """Have this process read no settings for indexes and proxies but `variables`."""
    import os

    for name in [*os.environ]:
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NETRC", str(home / "no-netrc"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


class _Handler(BaseHTTPRequestHandler):
    @property
    def index(self) -> FakeIndex:
        found: FakeIndex = self.server.index  # type: ignore[attr-defined]
        return found

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        headers = self.headers
        self.index.asked.append(Asked(self.path, headers["Range"], headers["Authorization"]))
        if self.index.credentials is not None:
            token = base64.b64encode(self.index.credentials.encode()).decode()
            if headers["Authorization"] != f"Basic {token}":
                self._send(401, {}, b"")
                return
        name = self.path.rpartition("/")[2]
        if self.path == f"/simple/{PROJECT}/":
            self._send_page()
        elif self.path.startswith("/files/") and name in self.index.files:
            self._send_file(self.index.files[name])
        else:
            self._send(404, {}, b"")

    def _send_page(self) -> None:
        kind, page = self._json() if self.index.as_json else self._html()
        self._send(200, {"Content-Type": kind}, self.index.page or page)

    def _digest(self, data: bytes) -> str | None:
        return hashlib.sha256(data).hexdigest() if self.index.digest == "" else self.index.digest

    def _json(self) -> tuple[str, bytes]:
        files = []
        for name, data in self.index.files.items():
            digest = self._digest(data)
            hashes = {"sha256": digest} if digest else {}
            files.append({"filename": name, "url": f"../../files/{name}", "hashes": hashes})
        page = {"meta": {"api-version": "1.0"}, "name": PROJECT, "files": files}
        return "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()

    def _html(self) -> tuple[str, bytes]:
        links = ""
        for name, data in self.index.files.items():
            digest = self._digest(data)
            fragment = f"#sha256={digest}" if digest else ""
            links += f'<a href="../../files/{name}{fragment}">{name}</a>\n'
        return "text/html", f"<html><body>{links}</body></html>".encode()

    def _send_file(self, data: bytes) -> None:
        index = self.index
        status = index.statuses.pop(0) if index.statuses else 200
        if status != 200 or index.moved_to is not None:
            headers = {"Location": f"{index.moved_to}{self.path}"} if index.moved_to else {}
            self._send(302 if index.moved_to else status, headers, b"")
            return
        begin = 0
        headers = {}
        if index.ranges and self.headers["Range"]:
            begin = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cut = index.cut_after.pop(0) if index.cut_after else None
        self._send(206 if headers else 200, headers, data[begin:], cut, index.has_lengths)

    def _send(
        self,
        status: int,
        headers: dict[str, str],
        data: bytes,
        cut: int | None = None,
        has_length: bool = True,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if has_length:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client has seen enough
            self.wfile.write(data[:cut])
