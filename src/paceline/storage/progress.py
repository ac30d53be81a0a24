"""Shows the progress of long work on standard error.

Invariant: nothing is written to standard output, and no output error stops the work.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any, TextIO

from paceline.storage.text import visible

Update = Callable[[int], None]
"""Called with the amount done so far."""


_LINE_SECONDS = 10.0


class Progress:
    """Lines and bars on `stream` (standard error by default); silent when `quiet`.

    A bar is drawn only when the stream is a terminal, and gone when its task has ended, so that
    several are one line with stages; otherwise each task is one plain line.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet

    def note(self, text: str) -> None:
        if not self._quiet:
            with contextlib.suppress(OSError, ValueError):  # a closed pipe must not stop the work
                stream = self._target()
                stream.write(visible(text, line=True) + "\n")
                stream.flush()

    @contextlib.contextmanager
    def task(
        self,
        label: str,
        total: int | None = None,
        *,
        unit: str = "bytes",
        shows_rate: bool = False,
    ) -> Iterator[Update]:
        """Show `label` while the body runs; the body reports the amount done of `total`.

        A `total` of None is unknown. `unit` is `bytes`, or anything else for plain numbers. With
        `shows_rate`, the rate and the time left are shown, without a terminal every ten seconds.

        >>> with Progress(quiet=True).task("copying", total=100) as update:
        ...     update(50)
        """
        if not self.is_shown:
            self.note(label)
            yield self._lines(label, total, unit) if shows_rate and total else lambda _done: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

        text = TextColumn("{task.description}", markup=False)
        done = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        columns = (
            (SpinnerColumn(), text, TimeElapsedColumn())
            if total is None
            else (text, BarColumn(), done, TimeElapsedColumn())
        )
        if shows_rate:
            columns = (*columns, TimeRemainingColumn())
        console = Console(file=self._target())
        with Bars(
            *columns,
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bars:
            bar, rate = bars.add_task(visible(label, line=True), total=total), _rate()

            def update(done: int) -> None:
                more: Any = {"description": f"{label}, {rate(done):.1f}/s"} if shows_rate else {}
                bars.update(bar, completed=done, **more)

            yield update
            if total is not None:
                bars.update(bar, completed=total)

    def _lines(self, label: str, total: int, unit: str) -> Update:
        """Return an `Update` that prints a line with the rate and the time left now and then."""
        rate, last = _rate(), monotonic()

        def update(done: int) -> None:
            nonlocal last
            speed = rate(done)
            if monotonic() - last >= _LINE_SECONDS:
                last = monotonic()
                left = f", {timedelta(seconds=round((total - done) / speed))} left" if speed else ""
                self.note(f"{label}: {done} of {total} {unit}, {speed:.1f}/s{left}")

        return update

    @property
    def is_shown(self) -> bool:
        """True if bars are drawn: not quiet, and on a terminal."""
        try:
            return not self._quiet and self._target().isatty()
        except (OSError, ValueError):
            return False

    def _target(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr


def _rate() -> Callable[[int], float]:
    """Return a function from the amount done so far to the amount per second since now."""
    started, first = monotonic(), None

    def rate(done: int) -> float:
        nonlocal first
        first = done - 1 if first is None else first  # the rest was done by an earlier run
        return (done - first) / max(monotonic() - started, 1e-3)

    return rate


QUIET = Progress(quiet=True)
