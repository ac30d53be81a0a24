"""Compares the calls of answers with a cost profile: corrects it, and notices one that is wrong.

A profile times every T in turns, for a second. In answers other work runs beside and T alternates:
calls of 8 rows were seen to take 1.41 plain calls where the profile said 1.20
(docs/decisions/auto-policy.md). Independent of where profiles are stored. Invariant: a busy machine
alone is no evidence against a profile before it has been busy for minutes; calls that are faster
than the profile are, because nothing makes calls faster than the machine is.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import exp, log
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

_REFERENCE_ROWS = 2
"""Plain decoding has one row or two, and one draft token often costs nothing."""

_LEAST_CALLS = 8
"""Calls of a T, and of the reference, for an answer to count."""

_PRIOR_CALLS = 32.0
"""Weight of the profile's own ratio, in calls."""

_MOST_CALLS = 1024.0
"""Weight at which older calls count less."""

_MOST = 2.0
"""Largest correction, up or down."""

_CHANGE = 0.03
"""Smallest change of a correction that is passed on."""

_CONTEXT_STEP = 256
_EXTRAPOLATION = 2
"""Calls at more than this many times the profile's longest context are not compared."""


class _ExpectedCosts:
    """Seconds that a profile expects of a call."""

    def __init__(self, profile: CostProfile) -> None:
        """Expect the costs of `profile`, its corrections included."""
        self._cost = profile.cost
        self._longest = max(profile.deep_context, profile.context) * _EXTRAPOLATION
        self._tables: dict[int, CostTable] = {}

    def ratio(self, rows: int, context: int, seconds: float) -> float | None:
        """Seconds over those expected; None for a call that the profile does not cover."""
        if rows > MAX_ROWS or context > self._longest:
            return None
        near = context - context % _CONTEXT_STEP
        if near not in self._tables:
            self._tables[near] = self._cost.at_context(near)
        return seconds / self._tables[near](rows)


class ProfileWatch:
    """A window is fast if its median is below half of the profile's time.

    It is slow if nine of ten of its calls take more than double.
    """

    def __init__(self, profile: CostProfile, clock: Callable[[], float] = monotonic) -> None:
        """`clock` returns seconds."""
        self._expected = _ExpectedCosts(profile)
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
        deviation = None
        for rows, context, seconds in calls:
            ratio = self._expected.ratio(rows, context, seconds)
            if ratio is None:
                continue
            window = self._windows[rows]
            window.append(ratio)
            if len(window) == _WINDOW:
                deviation = self._judge(rows, window) or deviation
                window.clear()
        return deviation

    def _judge(self, rows: int, ratios: list[float]) -> str | None:
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


class CostsInUse:
    """Corrections of a profile's costs by T, learnt from answers.

    Only calls of the same answer are compared, as the machine's speed varies from minute to minute.
    The costs of up to two rows, the reference, are never corrected.
    """

    def __init__(self, profile: CostProfile) -> None:
        """Begin with the corrections that `profile` has."""
        self._expected = _ExpectedCosts(profile)
        self._measured = sorted(rows for rows in profile.seconds if rows > _REFERENCE_ROWS)
        self._before = profile.corrections
        self._reported = dict(profile.corrections)
        self._sums: dict[int, tuple[float, float]] = {}
        """T -> weight in calls, and the weighted sum of the logarithms of ratios."""

    def add(self, calls: Iterable[tuple[int, int, float]]) -> Mapping[int, float] | None:
        """Add the calls of an answer: T, tokens before the block, seconds.

        Returns the new corrections, T -> factor on its seconds; None if they hardly changed.
        """
        ratios = defaultdict[int, list[float]](list)
        for rows, context, seconds in calls:
            ratio = self._expected.ratio(rows, context, seconds)
            if ratio is not None:
                ratios[self._group(rows)].append(ratio)
        reference = ratios.pop(_REFERENCE_ROWS, [])
        if len(reference) < _LEAST_CALLS:
            return None
        plain = median(reference)
        for rows, samples in ratios.items():
            if len(samples) >= _LEAST_CALLS and plain > 0 < median(samples):
                self._learn(rows, log(median(samples) / plain), min(len(samples), len(reference)))
        corrections = {rows: self._correction(rows) for rows in self._measured if self._sums}
        if all(
            abs(factor / self._reported.get(rows, 1.0) - 1) < _CHANGE
            for rows, factor in corrections.items()
        ):
            return None
        self._reported = corrections
        return corrections

    def _group(self, rows: int) -> int:
        """The least measured T that holds `rows`; `_REFERENCE_ROWS` for those of the reference."""
        if rows <= _REFERENCE_ROWS or not self._measured:
            return _REFERENCE_ROWS
        return self._measured[min(bisect_left(self._measured, rows), len(self._measured) - 1)]

    def _learn(self, rows: int, ratio: float, calls: int) -> None:
        weight, total = self._sums.get(rows, (0.0, 0.0))
        keep = min(1.0, max(_MOST_CALLS - calls, 0.0) / weight) if weight else 0.0
        self._sums[rows] = weight * keep + calls, total * keep + calls * ratio

    def _correction(self, rows: int) -> float:
        """That of the T nearest to `rows`, by ratio, that answers have shown."""
        near = min(self._sums, key=lambda row_count: abs(log(row_count / rows)))
        weight, total = self._sums[near]
        factor = self._before.get(rows, 1.0) * exp(total / (weight + _PRIOR_CALLS))
        return min(max(factor, 1 / _MOST), _MOST)
