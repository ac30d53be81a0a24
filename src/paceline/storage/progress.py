"""Shows the progress of long work on standard error.

Invariant: nothing is written to standard output, and no output error stops the work.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from paceline.storage.text import visible

Update = Callable[[int], None]
"""Called with the amount done so far."""


class Progress:
    """Lines and bars on `stream` (standard error by default); silent when `quiet`.

    A bar is drawn only when the stream is a terminal, and gone when its task has ended, so that
    several are one line with stages; otherwise each task is one plain line.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet

    def say(self, text: str) -> None:
        if not self._quiet:
            with contextlib.suppress(OSError, ValueError):  # a closed pipe must not stop the work
                stream = self._target()
                stream.write(visible(text, line=True) + "\n")
                stream.flush()

    @contextlib.contextmanager
    def task(
        self, label: str, total: int | None = None, *, unit: str = "bytes"
    ) -> Iterator[Update]:
        """Show `label` while the body runs; the body reports the amount done of `total`.

        A `total` of None is unknown. `unit` is `bytes`, or anything else for plain numbers.

        >>> with Progress(quiet=True).task("copying", total=100) as update:
        ...     update(50)
        """
        if not self.is_shown:
            self.say(label)
            yield lambda _done: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Bars

        text = TextColumn("{task.description}", markup=False)
        done = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        columns = (
            (SpinnerColumn(), text, TimeElapsedColumn())
            if total is None
            else (text, BarColumn(), done, TimeElapsedColumn())
        )
        console = Console(file=self._target())
        with Bars(
            *columns,
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bars:
            bar = bars.add_task(visible(label, line=True), total=total)
            yield lambda done: bars.update(bar, completed=done)
            if total is not None:
                bars.update(bar, completed=total)

    @property
    def is_shown(self) -> bool:
        """True if bars are drawn: not quiet, and on a terminal."""
        try:
            return not self._quiet and self._target().isatty()
        except (OSError, ValueError):
            return False

    def _target(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr


QUIET = Progress(quiet=True)
"""Writes nothing."""
