"""How long learning may take."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from time import monotonic


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


def duration(seconds: float) -> str:
    """Seconds for people, as in 7 h 20 min."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours else f"{minutes} min"
