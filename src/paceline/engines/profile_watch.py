"""Compares the calls of answers with a cost profile, to notice a profile that is wrong.

Independent of where profiles are stored. Invariant: a busy machine alone is no evidence against a
profile before it has been busy for minutes; calls that are faster than the profile are, because
nothing makes calls faster than the machine is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median, quantiles
from time import monotonic

from paceline.decoding.costs import CostTable
from paceline.engines.profile import MAX_ROWS, CostProfile

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

_CONTEXT_STEP = 256
_EXTRAPOLATION = 2
"""Calls at more than this many times the profile's longest context are not compared."""


class ProfileWatch:
    """A window is fast if its median is below half of the profile's time.

    It is slow if nine of ten of its calls take more than double.
    """

    def __init__(self, profile: CostProfile, clock: Callable[[], float] = monotonic) -> None:
        """`clock` returns seconds."""
        self._cost = profile.cost
        self._longest = max(profile.deep_context, profile.context) * _EXTRAPOLATION
        self._clock = clock
        self._tables: dict[int, CostTable] = {}
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
            if rows > MAX_ROWS or context > self._longest:
                continue
            window = self._windows[rows]
            window.append(seconds / self._expected(rows, context))
            if len(window) == _WINDOW:
                found = self._judge(rows, window) or found
                window.clear()
        return found

    def _expected(self, rows: int, context: int) -> float:
        near = context - context % _CONTEXT_STEP
        if near not in self._tables:
            self._tables[near] = self._cost.at_context(near)
        return self._tables[near](rows)

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
