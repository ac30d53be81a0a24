"""Two servers behind nginx with deploy/nginx.conf: sticky sessions, and failover."""

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.command import Command, free_port, served
from support.scripts import ROOT
from support.server import HTTP, good
from support.waiting import until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
_LISTENS, _SERVERS = 8000, (8001, 8002)
"""Ports in the file."""


CHAT = "/v1/chat/completions"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


@contextmanager
def proxied(ports: Sequence[int], folder: Path) -> Iterator[str]:
    """The URL of a proxy before two servers; its files are in `folder`."""
    proxy_port = free_port()
    text = (ROOT / "deploy/nginx.conf").read_text()
    for stated, port in zip((_LISTENS, *_SERVERS), (proxy_port, *ports), strict=True):
        assert f"127.0.0.1:{stated}" in text
        text = text.replace(f"127.0.0.1:{stated}", f"127.0.0.1:{port}")
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen(
        [str(NGINX), "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"],
        stderr=subprocess.PIPE,
    )
    url = f"http://127.0.0.1:{proxy_port}"
    try:
        until(lambda: process.poll() is not None or _listens(url))
        assert process.poll() is None, process.communicate()[1]
        yield url
    finally:
        process.terminate()
        process.communicate()


def _listens(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.HTTPError:
        return False


class Proxied:
    """Two servers, and the proxy before them."""

    def __init__(self, url: str, servers: list[Command]) -> None:
        self.url, self.servers = url, servers

    def answered(self) -> list[float]:
        return [counted(server.url) for server in self.servers]

    def ask(self, session: str) -> Any:
        body = {"messages": [turn(session)], "max_tokens": 12, "temperature": 0}
        headers = {"x-session-id": session}
        return good(HTTP.post(self.url + CHAT, json=body, headers=headers))


def turn(session: str) -> dict[str, str]:
    return {
        "role": "user",
        "content": f"{session}: " + "this is the one and that is the other " * 4,
    }


def counted(url: str) -> float:
    lines = HTTP.get(url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "paceline_answers_total{" in line)


@pytest.fixture
def two(tiny_gguf: Path, cache: Path, tmp_path: Path) -> Iterator[Proxied]:
    """At free ports."""
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(served(tiny_gguf, cache, "--port", str(port))) for port in ports
        ]
        assert all(server.url for server in servers)
        yield Proxied(stack.enter_context(proxied(ports, tmp_path)), servers)


def test_sessions_are_sticky_and_fail_over_when_a_server_is_killed(two: Proxied):
    texts: dict[str, str] = {}
    counts = {True: 0, False: 0}
    for number in range(64):  # the servers' random ports decide where a session goes
        session, before = f"session-{number}", two.answered()
        text = text_of(two.ask(session))
        place = two.answered()[0] > before[0]
        counts[place] += 1
        if counts[place] <= 3:
            texts[session] = text
        if all(counts.values()) and len(texts) >= 4:
            break
    assert all(counts.values()), "a server has no session"
    for session in texts:  # measuring a condition of exactness, once, evicts idle KV
        two.ask(session)
    for session, text in texts.items():
        again = two.ask(session)
        assert text_of(again) == text
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32, session

    two.servers[0].process.send_signal(signal.SIGKILL)
    two.servers[0].end()
    for session, text in texts.items():  # those of the killed server go to the other one
        assert text_of(two.ask(session)) == text


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text
