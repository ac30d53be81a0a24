"""A local Hugging Face Hub with the endpoints that huggingface_hub uses, and failures.

Files of weights are redirected to another address, as the hub redirects them to its storage, and
are sent in ranges. huggingface_hub reads HF_ENDPOINT when it is imported: a command in a process of
its own gets it in its environment, a test in this process replaces the constants (`use_hub`).
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

COMMIT, OLDER = "c" * 40, "0a" * 20
TOKEN = "hf_of_a_test"
_LARGE = (".gguf", ".bin", ".safetensors")


class Request(NamedTuple):
    """A request as a server got it."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class FakeRepository:
    files: Mapping[str, bytes]
    """Of the main branch."""
    older: Mapping[str, bytes] = field(default_factory=dict)
    """Of the tag v1, and of its commit."""
    gated: bool = False


@dataclass
class FakeHub:
    """A fake Hugging Face Hub: its repositories, its failures, and the requests it received."""

    url: str
    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    asked: list[Request] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    """Number of bytes before each of the next downloads breaks off."""
    stall_after: int | None = None
    """Number of bytes before each of the next downloads stalls."""
    closing: threading.Event = field(default_factory=threading.Event)
    other_bytes: bool = False
    """Whether the storage sends other bytes than the published ones."""

    def add(self, name: str, *paths: str, size: int = 1000, **more: Any) -> FakeRepository:
        """Add a repository with files of `size` bytes."""
        repository = FakeRepository({path: content(path, size) for path in paths}, **more)
        self.repositories[name] = repository
        return repository

    def downloads(self) -> list[Request]:
        """Requests for the bytes of large files."""
        return [request for request in self.asked if request.path.startswith("/storage/")]

    def environment(self, home: Path) -> dict[str, str]:
        """Variables of a command that uses this hub, with its cache in `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}


def content(path: str, size: int = 1000) -> bytes:
    """Bytes of a file, other ones for each path."""
    return (hashlib.sha256(path.encode()).digest() * (size // 32 + 1))[:size]


@contextlib.contextmanager
def serving() -> Iterator[FakeHub]:
    """A fake hub that answers until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    server.state = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub of this process use the fake hub, and the folder `cache`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _cache_manager

    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for module in (constants, _cache_manager):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(cache), raising=False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def state(self) -> FakeHub:
        hub: FakeHub = self.server.state  # type: ignore[attr-defined]
        return hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.state.asked.append(
            Request(self.command, path, headers["Range"], headers["Authorization"])
        )
        parts = path.strip("/").split("/")
        if parts[0] == "storage":
            self._send_range("/".join(parts[1:3]), parts[3], "/".join(parts[4:]))
        elif parts[:2] == ["api", "models"]:
            self._send_listing("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.send(404, {})

    def _send_listing(self, name: str, rest: list[str]) -> None:
        """Serve the requests of `model_info` and `list_repo_tree`."""
        commit = self._commit(name, rest[1] if len(rest) > 1 else "main")
        if commit is None:
            return
        files = self._files(name, commit)
        entries = [_entry(path, data) for path, data in files.items()]
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": entry.pop("rfilename"), **entry} for entry in entries]
            self.send(200, {}, json.dumps(tree).encode())
            return
        value = {"id": name, "modelId": name, "sha": commit, "siblings": entries, "tags": []}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send_file(self, name: str, revision: str, path: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return
        if (
            self.state.repositories[name].gated
            and self.headers["Authorization"] != f"Bearer {TOKEN}"
        ):
            self.send(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "accept the terms"})
            return
        data = self._files(name, commit).get(path)
        if data is None:
            self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_id(data)}"'}
        if not path.endswith(_LARGE):
            self.send(200, headers, data)
            return
        port = urlsplit(self.state.url).port
        headers["X-Linked-ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        headers["X-Linked-Size"] = str(len(data))
        headers["Location"] = f"http://localhost:{port}/storage/{name}/{commit}/{path}"
        self.send(302, headers)

    def _send_range(self, name: str, commit: str, path: str) -> None:
        """Bytes of a large file, as far as the hub sends them."""
        data = self._files(name, commit)[path]
        if self.state.other_bytes:
            data = bytes(len(data))
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cut = (
            self.state.cut_after.pop(0) if self.state.cut_after and self.command == "GET" else None
        )
        self.send(206 if begin else 200, headers, data[begin:], cut)

    def _commit(self, name: str, revision: str) -> str | None:
        """Commit of a revision; None, with an answer sent, if there is none."""
        repository = self.state.repositories.get(name)
        if repository is None:
            self.send(404, {"X-Error-Code": "RepoNotFound"})
            return None
        known = {"main": COMMIT, COMMIT: COMMIT}
        if repository.older:
            known |= {"v1": OLDER, OLDER: OLDER}
        if revision not in known:
            self.send(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return known[revision]

    def _files(self, name: str, commit: str) -> Mapping[str, bytes]:
        repository = self.state.repositories[name]
        return repository.older if commit == OLDER else repository.files

    def send(
        self, status: int, headers: Mapping[str, str], data: bytes = b"", cut: int | None = None
    ) -> None:
        """Send an answer; its connection breaks off after `cut` bytes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # the client has seen enough
                self._write(data[:cut])
        if cut is not None:
            self.close_connection = True

    def _write(self, data: bytes) -> None:
        stall = self.state.stall_after if self.path.startswith("/storage/") else None
        self.wfile.write(data[:stall])
        if stall is not None:
            self.wfile.flush()
            self.state.closing.wait()
            self.close_connection = True


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": path, "size": len(data), "oid": _git_id(data)}
    if path.endswith(_LARGE):
        digest = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 134}
    return entry


def _git_id(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
