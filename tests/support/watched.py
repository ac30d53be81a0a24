"""Commands in a home of their own, watched: the machines that they call, and the files they write.

A `sitecustomize.py` on PYTHONPATH logs both in each Python process that a command starts, children
of children included. What native code writes is in the folders afterwards.
"""

import getpass
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import PATIENCE

HOOK = """
import json, os, sys

log = os.open(os.environ["WATCHED_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        entry = "host", arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        entry = "host", arguments[1][0]
    elif event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & writes:
        entry = "file", os.path.abspath(arguments[0])
    elif event == "os.mkdir":
        entry = "file", os.path.abspath(arguments[0])
    else:
        return
    kind, name = entry
    name = os.fsdecode(name) if isinstance(name, bytes) else name
    os.write(log, (json.dumps([kind, name]) + "\\n").encode())

sys.addaudithook(watch)
"""

_THIS_MACHINE = (None, "", "localhost", "127.0.0.1", "::1")

_SWITCHES = (*("CI", "TF_BUILD", "JENKINS_URL"), *("DO_NOT_TRACK", "DISABLE_TELEMETRY"))
"""Variables with which libraries report nothing; a user's machine has none of them."""

_USER = ("HF_", "MPL", "PACELINE_", "TORCH", "XDG_")
"""Beginnings of variables that name a user's folders and habits."""

_DEVICES = (Path("/dev"), Path("/proc/self"))

_LIBRARIES = ("mlx", f"torchinductor_{getpass.getuser()}")
"""Left in the folder of temporary files: kernels of MLX without a GPU; torch's folder, empty."""


class Home:
    """An empty home, a cache folder and a current folder; processes that are started have them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = folder / "cache"
        self._home, self._temporary = folder / "home", folder / "temporary"
        self._current, hook = folder / "current", folder / "hook"
        for path in (self.cache, self._home, self._temporary, self._current, hook):
            path.mkdir()
        self._log = folder / "log"
        (hook / "sitecustomize.py").write_text(HOOK)
        for name in [*os.environ]:
            if name in _SWITCHES or name.startswith(_USER):
                monkeypatch.delenv(name)
        for name, value in {
            **{"HOME": self._home, "USERPROFILE": self._home, "TMPDIR": self._temporary},
            **{"PACELINE_CACHE": self.cache, "WATCHED_LOG": self._log, "PYTHONPATH": hook},
            "PYTHONDONTWRITEBYTECODE": 1,
        }.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(self._current)

    def run(self, *words: object, stdin: str = "") -> str:
        """Run a command of paceline to its end, without an error; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *map(str, words)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def hosts(self) -> set[str]:
        """Other machines that were looked up or called, by name or address."""
        hosts = {name for kind, name in self._entries() if kind == "host"}
        return {host for host in hosts if host not in _THIS_MACHINE}

    def written(self, *named: str) -> set[str]:
        """Files outside of the cache folder that were written, or folders that were made.

        Without `named`, those in the current folder that the command had to write, and without
        what is gone from there or was temporary.
        """
        allowed = (
            *(self.cache, *_DEVICES),
            *(self._current / name for name in named),
            *(self._temporary / name for name in _LIBRARIES),
        )
        left = [
            path
            for folder in (self._home, self._current, self._temporary)
            for path in folder.rglob("*")
        ]
        temporary = (self._temporary, self._current, self._log)
        opened = [
            path
            for kind, name in self._entries()
            if kind == "file" and not _is_in(path := Path(name), temporary)
        ]
        return {str(path) for path in (*left, *opened) if not _is_in(path, allowed)}

    def _entries(self) -> Iterator[tuple[str, str]]:
        for line in self._log.read_text().splitlines():
            kind, name = json.loads(line)
            yield kind, name


def _is_in(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
