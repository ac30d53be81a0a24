"""Child processes: one run to its end, and one that answers requests.

The second is for code that is not trusted with this process: a handler in `guarded.py`.

Invariants: however `run_child` ends (result, error, Ctrl-C), the child has ended too. A request
gets its own answer. After Ctrl-C the process that answers is replaced.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ModelError, PacelineError
from paceline.system.machine import ALARM_EXIT, HAS_ALARM

_TRIALS = 3
"""How often a request is sent while children end for other reasons."""

if sys.platform == "win32":
    _INTERRUPT = signal.SIGTERM  # it ends the process
else:
    _INTERRUPT = signal.SIGUSR1


class Finished(NamedTuple):
    """Exit status of a child (negative: the signal) and the lines of its output."""

    code: int
    lines: tuple[str, ...]

    @property
    def reason(self) -> str:
        """The last line that is not empty, or how the child ended."""
        if self.code < 0:
            return f"ended by signal {-self.code}"
        return next((line for line in reversed(self.lines) if line.strip()), "it gave no reason")


def python(*arguments: str) -> list[str]:
    """Command line of this interpreter, without imports from the current folder."""
    return [sys.executable, "-P", *arguments]


def run_child(argv: Sequence[str]) -> Finished:
    """Run `argv` to its end, without input; both of its streams are its output.

    Raises OSError when it cannot be started. On any exception, Ctrl-C included, the child is ended.
    """
    child = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return Finished(child.returncode, tuple(child.stdout.splitlines()))


_WITH_THREADS = set[int]()
"""The process that has the native threads of engines: one, or none yet."""


def in_forked_child() -> bool:
    """Return whether this process was forked after an engine was opened."""
    return bool(_WITH_THREADS) and os.getpid() not in _WITH_THREADS


def use_native_threads() -> None:
    """Call before an engine is opened or used. Raises PacelineError in a forked child.

    The threads of an engine are not in the child, which would wait for them for ever. Neither can
    it open another engine: libgomp has one pool of threads for all.
    """
    if in_forked_child():
        raise PacelineError(
            f"process {min(_WITH_THREADS)} has loaded a model, and this child, forked from it, has "
            "none of its threads; load the model in the child alone, started with "
            "multiprocessing's `spawn` or before any model is loaded"
        )
    _WITH_THREADS.add(os.getpid())


class TimeLimit(Exception):
    """The process was ended at its deadline."""


class WorkerCrash(ModelError):
    """The process ended on its own: its memory is limited."""


class Interrupted(Exception):
    """The request was ended by its `Interrupt`."""


class Interrupt:
    """Ends a request from another thread, before or while it is answered. Thread-safe."""

    def __init__(self) -> None:
        self.requested = False
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def request(self) -> None:
        """End the request; of a process that answers in a child, that child alone."""
        with self._lock:
            self.requested = True
            if self._child is not None:
                self._child.send_signal(_INTERRUPT)

    @contextmanager
    def answering(self, child: "subprocess.Popen[bytes]") -> Iterator[None]:
        """While this process answers the request. Raises Interrupted if it was ended before."""
        with self._lock:
            if self.requested:
                raise Interrupted
            self._child = child
        try:
            yield
        finally:
            with self._lock:
                self._child = None


class WorkerProcess:
    """A process that answers requests by a handler of `guarded.py`. Thread-safe."""

    def __init__(self, handler: Path, task: str, *arguments: str) -> None:
        """Do not start the process yet. `task` describes it in errors."""
        guarded = Path(__file__).with_name("guarded.py")
        self._command = python(str(guarded), str(handler), *arguments)
        self._task = task
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._sent = 0
        """Requests that this process has got."""

    def __del__(self) -> None:
        self._end()

    def start(self) -> None:
        """Start the process if necessary, without waiting 0.1 s until it is ready.

        Raises ModelError if it cannot be started.
        """
        with self._lock:
            self._running()

    def ask(
        self, request: bytes, seconds: float, interrupt: Interrupt | None = None
    ) -> dict[str, Any]:
        """Send a request, one line of JSON that has its time limit too; returns the answer.

        In place of a child that has ended, its parent answers {"ended": exit code, "interrupted":
        whether by SIGUSR1, "read": number of requests that it and earlier children have read}.

        Raises:
            TimeLimit: it took too long.
            Interrupted: `interrupt` was requested.
            WorkerCrash: the process has ended.
            ModelError: it cannot be started.
        """
        interrupt = interrupt or Interrupt()
        with self._lock:
            for _ in range(_TRIALS):
                answer, is_late = self._answer(request, seconds, interrupt)
                if "ended" not in answer:
                    return answer
                if interrupt.requested:
                    raise Interrupted
                if answer["read"] == self._sent and not answer["interrupted"]:
                    break  # else it has ended for an earlier request
        code = answer["ended"]
        if code == ALARM_EXIT or is_late:
            raise TimeLimit
        how = f"signal {-code}" if code < 0 else f"status {code}"
        raise WorkerCrash(f"the process that {self._task} ended with {how}")

    def _answer(
        self, request: bytes, seconds: float, interrupt: Interrupt
    ) -> tuple[dict[str, Any], bool]:
        """Return the response, or how the process ended; and whether it ran out of time."""
        child = self._running()
        with interrupt.answering(child):
            self._sent += 1
            try:
                with _ended_after(child, seconds) as late:
                    line = _exchange(child, request)
            except BaseException:  # also Ctrl-C: the next request would get this answer
                self._end()
                raise
        if line:
            answer: dict[str, Any] = json.loads(line)
        else:
            answer = {"ended": child.wait(), "interrupted": False, "read": self._sent}
        if answer.get("read", self._sent) != self._sent or not line:
            self._end()
        return answer, late.is_set()

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
            self._sent = 0
        except OSError as error:
            raise ModelError(
                f"the process that {self._task} cannot be started: {error.strerror}"
            ) from error
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        end_session(child)
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):  # unsent data
                if pipe is not None:
                    pipe.close()


def end_session(first: "subprocess.Popen[bytes]") -> None:
    """End a process that was started in its own session, and its children."""
    if sys.platform == "win32":
        first.kill()
    else:
        with suppress(OSError):  # all have ended
            os.killpg(first.pid, signal.SIGKILL)
    first.wait()


@contextmanager
def _ended_after(child: "subprocess.Popen[bytes]", seconds: float) -> Iterator[threading.Event]:
    """End a process at its deadline where it cannot do so itself; yield whether that happened."""
    late = threading.Event()

    def end() -> None:
        late.set()
        end_session(child)

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
