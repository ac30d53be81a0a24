"""Worker processes: started, asked, and their memory read.

Invariant: however a `with` block ends, its process has ended too.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from paceline.errors import ModelError
from paceline.storage.system import drop_pages

_WORKER = "paceline_lab.peers.calls.worker"
_SAMPLE_SECONDS = 0.02
_GRACE_SECONDS = 10.0


class Worker:
    """A process with a runtime; `ask` it one task at a time."""

    def __init__(self, setup: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start it, and wait until it has answered for the first time.

        `setup` is the argument of `worker.py`. Raises ModelError if it ends before.
        """
        self.name = str(setup["runtime"])
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        started = perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(env),
            text=True,
            encoding="utf-8",
        )
        self.peak_bytes = 0
        """Most anonymous memory seen, children included; 0 where the system does not report it."""
        try:
            done = threading.Event()
            sampler = threading.Thread(target=self._sample_until, args=(done,), daemon=True)
            sampler.start()
            try:
                self.ready: Mapping[str, Any] = self._read()
            finally:
                done.set()
                sampler.join()
            self.ready_seconds = perf_counter() - started
            """From its start to the first token of its first answer."""
        except BaseException:
            self.close()
            raise

    def ask(self, task: Mapping[str, int]) -> float | None:
        """Seconds of a task; None if the runtime cannot be asked for it. Raises ModelError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed() from error
        seconds: float | None = self._read()["seconds"]
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self._process.pid))
        return seconds

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()  # its loop ends
        self._end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    def _end(self) -> None:
        """Wait for the end of the process; kill it after `_GRACE_SECONDS`."""
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        return json.loads(line)

    def _failed(self) -> ModelError:
        """The error of a process that ended too early, with its last line."""
        self._end()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
        return ModelError(f"{self.name} cannot run this model: {reason}")

    def _sample_until(self, done: threading.Event) -> None:
        while not done.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self._process.pid))


def anonymous_bytes(process: int) -> int:
    """Anonymous memory of a process and of its children; 0 where the system does not report it."""
    folder = Path("/proc", str(process))
    total = 0
    with suppress(OSError, ValueError, IndexError):
        status = (folder / "status").read_text(encoding="utf-8")
        total = int(status.split("RssAnon:", 1)[1].split(maxsplit=1)[0]) * 1024
        children = (folder / "task" / str(process) / "children").read_text(encoding="utf-8")
        total += sum(anonymous_bytes(int(child)) for child in children.split())
    return total


def drop_page_cache(path: Path) -> None:
    """Have the next reader of a file read it from the disk, where the system allows it."""
    with path.open("rb") as file:
        drop_pages(file)
