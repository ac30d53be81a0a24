"""`paceline serve` in a separate process, as a user starts it."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.waiting import PATIENCE


class Command:
    """A server in another process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.said = ""
        """What it wrote to standard error so far."""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        """The URL of the server, once it listens."""
        assert self._ready.wait(PATIENCE)
        assert " at http" in self.said, self.said
        return self.said.split(" at ")[-1].split("/v1")[0]

    def end(self) -> int:
        """Wait for its end; its exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if line.startswith("serving "):
                self._ready.set()
        self._ready.set()


@contextmanager
def started(command_line: list[str], cache: Path) -> Iterator[Command]:
    """A server that another process starts; at the end nothing of it is left."""
    process = subprocess.Popen(
        command_line,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACELINE_CACHE": str(cache)},
        start_new_session=True,
    )
    try:
        yield Command(process)
    finally:
        if _alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def served(
    model: Path | str, cache: Path, *arguments: str, open_files: int | None = None
) -> Iterator[Command]:
    """`paceline serve --model MODEL ...`; a test that leaves processes behind fails.

    `open_files` is the limit of its file descriptors, as of `ulimit -n`.
    """
    command_line = [sys.executable, "-m", "paceline", "serve", "--model", str(model), *arguments]
    if open_files is not None:
        command_line = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(open_files), *command_line]
    with started(command_line, cache) as command:
        yield command
        command.process.send_signal(signal.SIGTERM)
        command.end()
        assert not _alive(command.process.pid)


def free_port() -> int:
    """Return a port without a listener, below the system's range of automatic ports."""
    while True:
        port = random.randrange(20000, 30000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _alive(group: int) -> bool:
    """Return whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
