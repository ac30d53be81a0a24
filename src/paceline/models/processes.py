"""Runs a child process and reads its output.

Invariant: however the call ends (result, error, Ctrl-C), the child has ended too.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

KEPT_LINES = 200
GRACE_SECONDS = 5.0


class Finished(NamedTuple):
    """Exit status of a child (negative: the signal) and its last lines of output."""

    code: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The lines as one string."""
        return "\n".join(self.lines)

    @property
    def disk_full(self) -> bool:
        """Whether the output reports a full disk."""
        return "No space left" in self.text or "Disk quota" in self.text

    @property
    def reason(self) -> str:
        """The last line that is not empty, or how the child ended."""
        if self.code < 0:
            return f"ended by signal {-self.code}"
        return next((line for line in reversed(self.lines) if line.strip()), "it gave no reason")


def python(*arguments: str) -> list[str]:
    """Command line of this interpreter, without imports from the current folder."""
    return [sys.executable, "-P", *arguments]


def run_child(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Finished:
    """Run `argv` to its end; `on_line` gets each line of its output (both streams).

    Raises OSError when it cannot be started. On any exception, Ctrl-C included, the child is ended.
    """
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if env is None else dict(env),
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                kept.append(line.rstrip("\n"))
                if on_line is not None:
                    on_line(kept[-1])
        return Finished(child.wait(), tuple(kept))
    finally:
        _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
