"""The process of one model: `paceline serve` on a free local port.

A separate process frees all memory of a model once it is unloaded, and a crash does not affect
other models. It ends with this process, because its standard input ends then.
"""

import asyncio
import os
import re
import secrets
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from paceline.errors import ModelError, PacelineError
from paceline.system.processes import python

_SERVING = re.compile(r"serving .* at (http://\S+)/v1")
"""Matches the line that a server prints when it listens."""

_LINE_BYTES = 64 * 1024

_LONGEST = 24 * 3600.0
"""Longest wait in seconds, short enough that no clock overflows."""


class Child:
    """A model's server in its own process."""

    def __init__(self, process: Process, key: str, on_line: Callable[[str], None]) -> None:
        """Use a process that was just started; `on_line` receives the lines that it prints."""
        self._process, self.on_line = process, on_line
        self._lines: deque[str] = deque(maxlen=200)
        self._listening = asyncio.get_running_loop().create_future()
        self._reading = asyncio.ensure_future(self._read())
        self.url = ""
        """URL without a path; empty until it listens."""
        self.key = key
        self.headers = {"authorization": f"Bearer {key}"}
        """Headers for requests to it."""

    @classmethod
    async def start(
        cls, model: str, options: Sequence[str], on_line: Callable[[str], None]
    ) -> "Child":
        """Load a model; return once its server listens.

        Args:
            model: its name or path.
            options: further options of `paceline serve`.
            on_line: receives the lines of its log.

        Raises:
            ModelError: the model cannot be loaded; the message has the reason.
            PacelineError: the process cannot be started.
        """
        key = secrets.token_hex(16)
        argv = python("-m", "paceline", "serve", "--model", model, *_OWN, *options)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=PIPE,
                env={**os.environ, "PACELINE_API_KEY": key},
                start_new_session=True,  # Ctrl-C is for the router, which lets requests finish
                limit=_LINE_BYTES,
            )
        except OSError as error:
            raise PacelineError(f"cannot start the process of {model}: {error.strerror}") from error
        child = cls(process, key, on_line)
        try:
            child.url = await child._listening
        except BaseException:
            await child.stop(0.0)
            raise
        return child

    async def wait(self) -> None:
        await self._process.wait()

    async def stop(self, grace: float) -> None:
        """End it; its requests may finish for `grace` seconds or its own, shorter grace period."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), min(grace, _LONGEST))
        with suppress(ProcessLookupError):
            self._process.kill()
        await self.wait()

    async def _read(self) -> None:
        """Forward the lines of the log, and detect the line with the address."""
        stream = self._process.stderr
        assert stream is not None
        while line := await self._line(stream):
            self._lines.append(line)
            match = _SERVING.search(line)
            if match and not self._listening.done():
                self._listening.set_result(match[1])
            else:
                self.on_line(line)
        await self._process.wait()
        if not self._listening.done():
            self._listening.set_exception(ModelError(self.reason()))

    async def _line(self, stream: asyncio.StreamReader) -> str:
        """Return the next line that is not empty, or an empty one at the end."""
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # over the limit: not our line
                continue
            line = raw.decode("utf-8", "replace").strip()
            if line or not raw:
                return line

    def reason(self) -> str:
        """Return why it ended: its last line, which is its error."""
        code = self._process.returncode or 0
        if code < 0:
            return f"its process ended by signal {-code}"
        return self._lines[-1] if self._lines else f"its process ended with status {code}"


_OWN = ("--host", "127.0.0.1", "--port", "0", "--until-input-ends")
"""Options that make a server the child of another."""
