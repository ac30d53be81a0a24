"""Running one helper program and reading what it says.

Knows how to start a child, read its lines, and end it. Knows nothing about what the child does. The
rule: however this call ends (result, error, Ctrl-C), no child of it is left running.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

KEPT_LINES = 200
GRACE_SECONDS = 5.0


class Finished(NamedTuple):
    """How a child ended: its exit status (negative: the signal) and its last lines."""

    code: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The kept lines as one string."""
        return "\n".join(self.lines)

    @property
    def disk_full(self) -> bool:
        """Whether it says that the disk is full."""
        return "No space left" in self.text or "Disk quota" in self.text

    @property
    def reason(self) -> str:
        """The last line that says something, or how the child ended."""
        if self.code < 0:
            return f"ended by signal {-self.code}"
        return next((line for line in reversed(self.lines) if line.strip()), "it gave no reason")


def python(*arguments: str) -> list[str]:
    """A command line for this interpreter that imports nothing from the current folder."""
    return [sys.executable, "-P", *arguments]


def run_child(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Finished:
    """Run `argv` to its end, handing each line of its output (both streams) to `on_line`.

    Raises OSError when it cannot be started. Any exception, Ctrl-C included, ends the child first.
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
