"""Starts `paceline serve` for a script, and stops it."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_START_SECONDS = 120.0
_END_SECONDS = 40.0


@dataclass
class Server:
    """A running server."""

    url: str
    """As `http://127.0.0.1:8000/v1`."""
    process: int = 0
    """Its process ID."""
    ended: int | None = None
    """Exit status, once it has ended."""

    @property
    def root(self) -> str:
        """Its address without `/v1`."""
        return self.url.removesuffix("/v1")

    def metric(self, name: str) -> float:
        """Value of a metric.

        Raises:
            LookupError: there is no such metric.
        """
        text = httpx.get(f"{self.root}/metrics").text
        found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if found is None:
            raise LookupError(f"the server has no metric {name}")
        return float(found[1])


@contextmanager
def served(
    arguments: Sequence[str] = (),
    script: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run `paceline serve` with further `arguments` on a free port, or a `script` that serves.

    Raises:
        RuntimeError: it ended before it listened; the reason is on standard error.
    """
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *arguments]
    if script is not None:
        command = [sys.executable, str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        server = Server(_address(process), process.pid)
        try:
            yield server
        finally:
            process.terminate()
            server.ended = process.wait(_END_SECONDS)


def _address(process: subprocess.Popen[str]) -> str:
    """The address from its log; later lines of the log are passed on to standard error."""
    errors = process.stderr
    assert errors is not None
    watchdog = threading.Timer(_START_SECONDS, process.kill)
    watchdog.start()
    try:
        for line in errors:
            if found := re.search(r"serving .* at (http\S+)", line):
                threading.Thread(target=lambda: sys.stderr.writelines(errors), daemon=True).start()
                return found[1]
            sys.stderr.write(line)
    finally:
        watchdog.cancel()
    raise RuntimeError("paceline serve ended before it listened")
