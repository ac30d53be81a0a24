"""A process for what is not trusted with ours: it runs a script that answers requests.

The script limits its own time and memory, as `template_worker.py` does. Invariant: a request gets
its own answer. After an interruption the process is replaced.
"""

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
from paceline.storage.system import ALARM_EXITS, HAS_ALARM


class TimeLimit(Exception):
    """The process was ended at its deadline."""


class WorkerCrash(ModelError):
    """The process has ended by itself: its memory is limited."""


class WorkerProcess:
    """A process that runs a script. Thread-safe."""

    def __init__(self, script: Path, task: str, *arguments: str) -> None:
        """Does not start the process. `task` says for errors what it does."""
        self._command = [sys.executable, "-P", str(script), *arguments]
        self._task = task
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __del__(self) -> None:
        self._end()

    def start(self) -> None:
        """Start the process if necessary, without waiting 0.1 s until it is ready.

        Raises ModelError if it cannot be started.
        """
        with self._lock:
            self._running()

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Send a request, one line of JSON that has its time limit too; returns the answer.

        Raises:
            TimeLimit: it took too long.
            WorkerCrash: the process has ended.
            ModelError: it cannot be started.
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
        if code in ALARM_EXITS or late.is_set():
            raise TimeLimit
        how = f"signal {-code}" if code < 0 else f"status {code}"
        raise WorkerCrash(f"the process that {self._task} ended with {how}")

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
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C from the terminal
            )
        except OSError as error:
            raise ModelError(
                f"the process that {self._task} cannot be started: {error.strerror}"
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
