"""nginx with deploy/nginx.conf before servers at other ports."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.command import free_port
from support.scripts import ROOT
from support.waiting import until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
_LISTENS, _SERVERS = 8000, (8001, 8002)
"""Ports in the file."""


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
