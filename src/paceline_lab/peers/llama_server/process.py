"""A `llama-server` that runs for one answer: started on a free port, asked, ended.

Invariant: once it is closed, or this process is killed, the server has ended.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelError
from paceline.system.processes import end_session

if TYPE_CHECKING:
    import httpx

READY_SECONDS = 600.0
"""For a large file on a slow disk."""
_HEALTH_SECONDS = 5.0
_ANSWER_SECONDS = 3600.0
_END_SECONDS = 1.0
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.01
_MAX_REASON = 300
"""Characters of a server's own message."""

_KEEPER = Path(__file__).with_name("keeper.py")
_KEY_VARIABLE = "LLAMA_API_KEY"
_SETTINGS = "LLAMA_ARG_"
"""Begins the variables that set options of the server."""


class ServerProcess:
    """A running server; `ask` it one request at a time."""

    def __init__(self, program: Path, options: Sequence[str]) -> None:
        """Start it, and wait until it has loaded its model. Raises ModelError if it does not."""
        self.program = program
        self._port = _free_port()
        # Pages of other sites must not reach a server that allows all origins.
        self._key = secrets.token_hex(16)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-ISB", str(_KEEPER), str(program), *options, *address],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(self._key),
                start_new_session=True,  # Ctrl-C is ours to answer
            )
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def ask(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a POST request, as JSON. Raises ModelError if the server has none."""
        import httpx

        try:
            reply = self._request("POST", path, body, _ANSWER_SECONDS)
            answer = reply.json() if reply.is_success else None
        except (httpx.HTTPError, ValueError) as error:
            if self._ends_now():
                raise self._failed("ended in an answer") from error
            raise ModelError(f"{self.program.name} gave no answer to {path}: {error!r}") from error
        if not isinstance(answer, dict):
            reason = " ".join(reply.text.split())[:_MAX_REASON]
            status = reply.status_code
            raise ModelError(f"{self.program.name} answered {path} with status {status}: {reason}")
        return answer

    def close(self) -> None:
        if keeper := getattr(self, "_keeper", None):
            with suppress(OSError):
                keeper.stdin.close()  # the keeper ends the server, then itself
            try:
                with suppress(subprocess.TimeoutExpired):
                    keeper.wait(_GRACE_SECONDS)
            finally:  # also after a second Ctrl-C
                end_session(keeper)
        self._log.close()

    def _wait_until_ready(self) -> None:
        import httpx

        deadline = monotonic() + READY_SECONDS
        while monotonic() < deadline:
            # Before the port is asked: another process may have it.
            if self._ended():
                raise self._failed("ended before it was ready")
            with suppress(httpx.HTTPError):
                if self._request("GET", "/health", None, _HEALTH_SECONDS).is_success:
                    return
            sleep(_POLL_SECONDS)
        raise self._failed(f"was not ready after {READY_SECONDS:.0f} s")

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> "httpx.Response":
        import httpx

        # Not by a client that obeys the proxies of the environment.
        with httpx.Client(trust_env=False, timeout=seconds) as client:
            headers = {"Authorization": f"Bearer {self._key}"}
            url = f"http://127.0.0.1:{self._port}{path}"
            return client.request(method, url, json=body, headers=headers)

    def _ended(self) -> bool:
        return self._keeper.poll() is not None

    def _ends_now(self) -> bool:
        """Whether it has ended: its connections are closed a moment before."""
        with suppress(subprocess.TimeoutExpired):
            self._keeper.wait(_END_SECONDS)
        return self._ended()

    def _failed(self, how: str) -> ModelError:
        """An error with the first one that the server wrote, or its last line."""
        self._log.seek(0)
        written = self._log.read().decode(errors="replace").split("\n")
        lines = [" ".join(line.split()) for line in written if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
        reason = (errors[:1] or lines[-1:] or ["it wrote nothing"])[0][:_MAX_REASON]
        code = self._keeper.poll()
        status = "" if code is None else f" (exit code {code})"
        return ModelError(f"{self.program.name} {how}{status}: {reason}")


def _environment(key: str) -> dict[str, str]:
    """Variables of this process, without those that would give the server further options."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return {**kept, _KEY_VARIABLE: key}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
