"""A package index on this machine: a project's page, its files in ranges, and how it can fail."""

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from support import http

PROJECT = "tiny-llm"


@dataclass
class FakeIndex:
    """What the index has, how it fails, and what was asked of it."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[http.Request] = field(default_factory=list)
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

    def downloads(self) -> list[http.Request]:
        """Requests for the bytes of files."""
        return [request for request in self.asked if request.path.startswith("/files/")]


Index = TypeVar("Index", bound=FakeIndex)


@contextlib.contextmanager
def serving(make: Callable[[str], Index] = FakeIndex) -> Iterator[Index]:  # type: ignore[assignment]
    """An index that answers until the end of the block."""
    with http.serving(_Handler) as server:
        index = make(f"http://127.0.0.1:{server.server_port}")
        server.state = index  # type: ignore[attr-defined]
        yield index


def use_only(monkeypatch: pytest.MonkeyPatch, home: Path, **variables: str) -> None:
    """Have this process read no settings for indexes and proxies but `variables`."""
    for name in [*os.environ]:
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NETRC", str(home / "no-netrc"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


class _Handler(http.Handler):
    def answer(self) -> None:
        self.state.asked.append(self.request_for(self.path))
        if self.state.credentials is not None:
            token = base64.b64encode(self.state.credentials.encode()).decode()
            if self.headers["Authorization"] != f"Basic {token}":
                self.send(401, {})
                return
        name = self.path.rpartition("/")[2]
        if self.path == f"/simple/{PROJECT}/":
            self._send_page()
        elif self.path.startswith("/files/") and name in self.state.files:
            self._send_file(self.state.files[name])
        else:
            self.send(404, {})

    def _send_page(self) -> None:
        kind, page = self._json() if self.state.as_json else self._html()
        self.send(200, {"Content-Type": kind}, self.state.page or page)

    def _digest(self, data: bytes) -> str | None:
        return hashlib.sha256(data).hexdigest() if self.state.digest == "" else self.state.digest

    def _json(self) -> tuple[str, bytes]:
        files = []
        for name, data in self.state.files.items():
            digest = self._digest(data)
            hashes = {"sha256": digest} if digest else {}
            files.append({"filename": name, "url": f"../../files/{name}", "hashes": hashes})
        page = {"meta": {"api-version": "1.0"}, "name": PROJECT, "files": files}
        return "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()

    def _html(self) -> tuple[str, bytes]:
        links = ""
        for name, data in self.state.files.items():
            digest = self._digest(data)
            fragment = f"#sha256={digest}" if digest else ""
            links += f'<a href="../../files/{name}{fragment}">{name}</a>\n'
        return "text/html", f"<html><body>{links}</body></html>".encode()

    def _send_file(self, data: bytes) -> None:
        index = self.state
        status = index.statuses.pop(0) if index.statuses else 200
        if status != 200 or index.moved_to is not None:
            headers = {"Location": f"{index.moved_to}{self.path}"} if index.moved_to else {}
            self.send(302 if index.moved_to else status, headers)
            return
        begin = self.first_byte() if index.ranges else 0
        headers = {}
        if index.ranges and self.headers["Range"]:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cut = index.cut_after.pop(0) if index.cut_after else None
        self.send(206 if headers else 200, headers, data[begin:], cut, has_length=index.has_lengths)
