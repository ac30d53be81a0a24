"""How long learning may take, and a progress that says how much of it is left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from time import monotonic

from paceline.models import Progress
from paceline.storage.progress import Update

_LINES = 10
"""Where no bars are drawn, a task is a line: about this many are written, evenly over the time."""


@dataclass(slots=True)
class Budget:
    """Time, or tokens of answers, that learning may take."""

    seconds: float
    """From now on; infinite with `tokens`."""
    tokens: int | None = None
    """Tokens of answers from which no more are made; None: as many as the time allows."""
    _began: float = field(default_factory=monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(self.seconds - self.elapsed, 0.0)

    def stop_after(self, share: float) -> Callable[[], bool]:
        """Tells whether a share of the time is over; never if there are `tokens`."""
        return lambda: self.elapsed >= share * self.seconds

    def over(self, part: float, share: float) -> Callable[[], float]:
        """Tells how much is over of a part of the time from its first call to a share of the whole.

        1 or more: all; 0 if there are `tokens`.
        """
        first = cache(lambda: self.elapsed)

        def over() -> float:
            seconds = part * (share * self.seconds - first())
            return (self.elapsed - first()) / seconds if seconds > 0 else 1.0

        return over


class LearningProgress(Progress):
    """Shows each task of learning with what is left of the whole."""

    def __init__(self, progress: Progress, budget: Budget) -> None:
        """Show on the stream of `progress`."""
        super().__init__(quiet=not progress.is_shown)
        self._plain, self._budget = progress, budget
        self._lines = 0

    def say(self, text: str) -> None:
        """Write one line."""
        self._plain.say(text)

    @contextmanager
    def task(
        self, label: str, total: int | None = None, *, unit: str = "bytes"
    ) -> Iterator[Update]:
        """Show a task; without bars, a line at each tenth of the time."""
        budget = self._budget
        if budget.tokens is None:
            label = f"learning, {duration(budget.left)} left: {label}"
        if self.is_shown:
            with super().task(label, total, unit=unit) as update:
                yield update
            return
        share = 1 if budget.tokens else budget.elapsed / max(budget.seconds, 1e-9)
        if share * _LINES >= self._lines:
            self._lines = int(share * _LINES) + 1
            self.say(label)
        yield lambda _done: None


def duration(seconds: float) -> str:
    """Seconds for people, as in 7 h 20 min."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours else f"{minutes} min"
