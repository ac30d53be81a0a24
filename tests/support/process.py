"""Commands in separate processes, as a user starts them."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.waiting import PATIENCE

COMMAND = [sys.executable, "-m", "paceline"]


Run = Callable[..., "subprocess.CompletedProcess[Any]"]


def python(
    *words: object, code: int = 0, env: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run Python to its end, with variables besides those of this process."""
    found = subprocess.run(
        [sys.executable, *map(str, words)],
        **{"capture_output": True, "text": True, "timeout": PATIENCE, **options},
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert found.returncode == code, found.stderr
    return found


@contextlib.contextmanager
def started(environment: dict[str, str], *arguments: object, **options: Any) -> Iterator[Any]:
    child = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, **options},
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def command_lines() -> Iterator[tuple[int, bytes]]:
    """Yield the id and the command line of every process."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:  # it has ended
            continue
        yield int(path.parent.name), line


def stopped_line(text: bytes) -> None:
    lines = [line for line in text.decode().splitlines() if line.startswith("paceline")]
    assert lines == ["paceline: stopped"]
    assert b"Traceback" not in text
    # `weakref` imports `gc` at the end, and Python says so where a test has it time imports.
    last = [line for line in text.splitlines() if not line.startswith(b"import time:")][-1]
    assert last == b"paceline: stopped"


def wait_for(stream: Any, word: bytes) -> bytes:
    heard = b""
    for line in stream:
        heard += line
        if word in line:
            return heard
    raise AssertionError(heard)
