"""The process that renders chat templates, started once; it runs `template_worker.py`.

Invariant: a request gets its own answer. After an interruption the process is replaced.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.system import ALARM_EXIT, HAS_ALARM

_SCRIPT = Path(__file__).with_name("template_worker.py")


class TimeLimit(Exception):
    """The process was ended at its deadline."""


class TemplateProcess:
    """A process that renders templates. Thread-safe."""

    def __init__(self) -> None:
        """Does not start the process."""
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def start(self) -> None:
        """Start the process if necessary, without waiting 0.1 s until it is ready.

        Raises ModelError if it cannot be started.
        """
        with self._lock:
            self._running()

    def render(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Send a request, one line of JSON that has its time limit too; returns the answer.

        Raises:
            TimeLimit: it took too long.
            ModelError: the process cannot be started, or has crashed.
        """
        with self._lock:
            child = self._running()
            try:
                with _ended_after(child, seconds) as late:
                    line = _exchange(child, request)
                if line:
                    answer: dict[str, Any] = json.loads(line)
                    return answer
            except BaseException:  # also Ctrl-C: the next request would get this answer
                self._end()
                raise
            code = child.wait()
            self._end()
        if code == ALARM_EXIT or late.is_set():
            raise TimeLimit
        how = f"signal {-code}" if code < 0 else f"status {code}"
        raise ModelError(f"the process that renders chat templates ended with {how}")

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._end()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._owner != os.getpid():  # forked: the process is the parent's
            self._child, self._owner = None, os.getpid()
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C from the terminal
            )
        except OSError as error:
            raise ModelError(
                f"the process that renders chat templates cannot be started: {error.strerror}"
            ) from error
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):  # unsent data
                if pipe is not None:
                    pipe.close()


@contextmanager
def _ended_after(child: "subprocess.Popen[bytes]", seconds: float) -> Iterator[threading.Event]:
    """Where a process cannot have itself ended at its deadline, end it; yields whether that was."""
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(seconds, end)
    if not HAS_ALARM:
        timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _exchange(child: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    """Return the line of the answer; empty when the process has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(request + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return b""
    return child.stdout.readline()


PROCESS = TemplateProcess()
"""Shared by all templates."""

atexit.register(PROCESS.close)
