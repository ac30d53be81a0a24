"""A `paceline serve` of one's own, for as long as one needs it."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

_START_SECONDS = 120.0
_END_SECONDS = 40.0


@dataclass
class Server:
    """A server that answers."""

    url: str
    """As `http://127.0.0.1:8000/v1`."""
    ended: int | None = None
    """What it exited with, once it has."""

    @property
    def root(self) -> str:
        """Its address without `/v1`."""
        return self.url.removesuffix("/v1")

    def metric(self, name: str) -> float:
        """A value of its metrics.

        Raises:
            LookupError: it has none of that name.
        """
        text = httpx.get(f"{self.root}/metrics").text
        found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if found is None:
            raise LookupError(f"the server has no metric {name}")
        return float(found[1])


@contextmanager
def served(arguments: Sequence[str] = ()) -> Iterator[Server]:
    """Start `paceline serve` with more `arguments` on a free port, and end it.

    Raises:
        RuntimeError: it ended before it listened; it said why on standard error.
    """
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        server = Server(_address(process))
        try:
            yield server
        finally:
            process.terminate()
            server.ended = process.wait(_END_SECONDS)


def _address(process: subprocess.Popen[str]) -> str:
    """Where it listens, once it says so; what it says later is passed on."""
    errors = process.stderr
    assert errors is not None
    impatience = threading.Timer(_START_SECONDS, process.kill)
    impatience.start()
    try:
        for line in errors:
            if found := re.search(r"serving .* at (http\S+)", line):
                threading.Thread(target=lambda: sys.stderr.writelines(errors), daemon=True).start()
                return found[1]
            sys.stderr.write(line)
    finally:
        impatience.cancel()
    raise RuntimeError("paceline serve ended before it listened")
