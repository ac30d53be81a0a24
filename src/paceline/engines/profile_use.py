"""Corrects a cost profile by what the calls of answers take.

A profile times each T in turns, for a second. In answers other work runs beside and T alternates:
calls of 8 rows were seen to take 1.41 plain calls where the profile said 1.20
(docs/decisions/auto-policy.md). Only calls of one answer are compared with each other, as the
machine's speed varies from minute to minute. Invariant: the costs of up to two rows, the reference,
are never corrected.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import exp, log
from statistics import median

from paceline.decoding.costs import CostTable
from paceline.engines.profile import MAX_ROWS, CostProfile

REFERENCE_ROWS = 2
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


class ExpectedCosts:
    """What a profile says of a call."""

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


class CostsInUse:
    """Corrections of a profile's costs by T, learnt from answers."""

    def __init__(self, profile: CostProfile) -> None:
        """Begin with the corrections that `profile` has."""
        self._expected = ExpectedCosts(profile)
        self._measured = sorted(rows for rows in profile.seconds if rows > REFERENCE_ROWS)
        self._before = profile.corrections
        self._told = dict(profile.corrections)
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
        reference = ratios.pop(REFERENCE_ROWS, [])
        if len(reference) < _LEAST_CALLS:
            return None
        plain = median(reference)
        for rows, each in ratios.items():
            if len(each) >= _LEAST_CALLS and plain > 0 < median(each):
                self._learn(rows, log(median(each) / plain), min(len(each), len(reference)))
        found = {rows: self._correction(rows) for rows in self._measured} if self._sums else {}
        if all(abs(new / self._told.get(rows, 1.0) - 1) < _CHANGE for rows, new in found.items()):
            return None
        self._told = found
        return found

    def _group(self, rows: int) -> int:
        """The least measured T that holds `rows`; `REFERENCE_ROWS` for those of the reference."""
        if rows <= REFERENCE_ROWS or not self._measured:
            return REFERENCE_ROWS
        return self._measured[min(bisect_left(self._measured, rows), len(self._measured) - 1)]

    def _learn(self, rows: int, ratio: float, calls: int) -> None:
        weight, total = self._sums.get(rows, (0.0, 0.0))
        keep = min(1.0, max(_MOST_CALLS - calls, 0.0) / weight) if weight else 0.0
        self._sums[rows] = weight * keep + calls, total * keep + calls * ratio

    def _correction(self, rows: int) -> float:
        """That of the T nearest to `rows`, by ratio, that answers have shown."""
        near = min(self._sums, key=lambda each: abs(log(each / rows)))
        weight, total = self._sums[near]
        factor = self._before.get(rows, 1.0) * exp(total / (weight + _PRIOR_CALLS))
        return min(max(factor, 1 / _MOST), _MOST)
