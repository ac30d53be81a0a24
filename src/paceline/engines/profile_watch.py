"""Compares the calls of answers with a cost profile, to notice a profile that is wrong.

Independent of where profiles are stored. Invariant: a busy machine alone is no evidence against a
profile before it has been busy for minutes; calls that are faster than the profile are, because
nothing makes calls faster than the machine is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median, quantiles
from time import monotonic

from paceline.engines.profile import CostProfile
from paceline.engines.profile_use import ExpectedCosts

_WINDOW = 32
"""Calls of one T that are judged together."""

_DEVIATION = 2.0
"""Ratio to the profile's seconds at which a window deviates. The speed of a shared machine was seen
to vary by 1.5 within minutes (2026-11-22)."""

_FAST_WINDOWS = 4
"""Consecutive fast windows of a T after which a profile is wrong: it was measured on a busy
machine."""

_SLOW_WINDOWS, _SLOW_SECONDS = 32, 600.0
"""The same of slow windows, and the least time between the first and the last of them."""


class ProfileWatch:
    """A window is fast if its median is below half of the profile's time.

    It is slow if nine of ten of its calls take more than double.
    """

    def __init__(self, profile: CostProfile, clock: Callable[[], float] = monotonic) -> None:
        """`clock` returns seconds."""
        self._expected = ExpectedCosts(profile)
        self._clock = clock
        self._windows = defaultdict[int, list[float]](list)
        self._fast = defaultdict[int, int](int)
        self.fits = False
        """Whether a window was neither fast nor slow."""
        self._slow: dict[int, tuple[int, float]] = {}
        """T -> number of consecutive slow windows, and when the first of them ended."""

    def add(self, calls: Iterable[tuple[int, int, float]]) -> str | None:
        """Add calls of one sequence: T, tokens before the block, seconds.

        Returns a clause that says how they deviate from the profile; None if they do not.
        """
        found = None
        for rows, context, seconds in calls:
            ratio = self._expected.ratio(rows, context, seconds)
            if ratio is None:
                continue
            window = self._windows[rows]
            window.append(ratio)
            if len(window) == _WINDOW:
                found = self._judge(rows, window) or found
                window.clear()
        return found

    def _judge(self, rows: int, ratios: list[float]) -> str | None:
        """Judge a full window."""
        middle, now = median(ratios), self._clock()
        self._fast[rows] = self._fast[rows] + 1 if middle < 1 / _DEVIATION else 0
        count, since = self._slow.pop(rows, (0, now))
        if quantiles(ratios, n=10)[0] > _DEVIATION:
            count += 1
            self._slow[rows] = count, since
        self.fits = self.fits or 1 / _DEVIATION <= middle <= _DEVIATION
        slow = count >= _SLOW_WINDOWS and now - since >= _SLOW_SECONDS
        if not slow and self._fast[rows] < _FAST_WINDOWS:
            return None
        return f"calls of {rows} rows take {middle:.2g} times what the cost profile says"
