"""A `llama-server` for one answer: starts it on a free port, sends a request, ends it.

Invariant: once it is closed, the server has ended.
"""

import os
import secrets
import socket
import subprocess
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
"""Time limit for loading, in seconds: a large file may be on a slow disk."""
_HEALTH_SECONDS = 5.0
_ANSWER_SECONDS = 3600.0
_END_SECONDS = 1.0
_POLL_SECONDS = 0.01
_MAX_REASON = 300
"""Maximum characters of a server's own message."""

_KEY_VARIABLE = "LLAMA_API_KEY"
_SETTINGS = "LLAMA_ARG_"
"""Occurs in the names of environment variables that set further server options."""


class ServerProcess:
    """A running server; call `ask` for one request at a time."""

    def __init__(self, program: Path, options: Sequence[str]) -> None:
        """Start it, and wait until it has loaded its model. Raises ModelError if it does not."""
        self.program = program
        with socket.socket() as listener:  # on a free port
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        # Pages of other sites must not reach a server that allows all origins.
        self._key = secrets.token_hex(16)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        variables = {name: one for name, one in os.environ.items() if _SETTINGS not in name}
        self._process = subprocess.Popen(
            [str(program), *options, *address],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**variables, _KEY_VARIABLE: self._key},
            start_new_session=True,  # this process handles Ctrl-C
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def ask(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a POST request; return its JSON answer. Raises ModelError if there is none."""
        import httpx

        try:
            reply = self._request("POST", path, body, _ANSWER_SECONDS)
            answer = reply.json() if reply.is_success else None
        except (httpx.HTTPError, ValueError) as error:
            try:
                self._process.wait(_END_SECONDS)  # its connections close shortly before it ends
            except subprocess.TimeoutExpired:
                fault = f"{self.program.name} gave no answer to {path}: {error!r}"
                raise ModelError(fault) from error
            raise self._failed("ended in an answer") from error
        if not isinstance(answer, dict):
            reason = " ".join(reply.text.split())[:_MAX_REASON]
            status = reply.status_code
            raise ModelError(f"{self.program.name} answered {path} with status {status}: {reason}")
        return answer

    def close(self) -> None:
        end_session(self._process)
        self._log.close()

    def _wait_until_ready(self) -> None:
        import httpx

        deadline = monotonic() + READY_SECONDS
        while monotonic() < deadline:
            # Before the request: another process may have the port.
            if self._process.poll() is not None:
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

        # Not with a client that uses the proxies of the environment.
        with httpx.Client(trust_env=False, timeout=seconds) as client:
            headers = {"Authorization": f"Bearer {self._key}"}
            url = f"http://127.0.0.1:{self._port}{path}"
            return client.request(method, url, json=body, headers=headers)

    def _failed(self, how: str) -> ModelError:
        """Return an error with the first error line that the server wrote, or its last line."""
        self._log.seek(0)
        written = self._log.read().decode(errors="replace").split("\n")
        lines = [" ".join(line.split()) for line in written if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
        reason = (errors[:1] or lines[-1:] or ["it wrote nothing"])[0][:_MAX_REASON]
        code = self._process.poll()
        status = "" if code is None else f" (exit code {code})"
        return ModelError(f"{self.program.name} {how}{status}: {reason}")
