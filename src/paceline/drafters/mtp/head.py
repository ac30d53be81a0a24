"""The `DraftHead` protocol, and the measurement of its cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from paceline.decoding.draft_sampling import DraftSampler
from paceline.drafters.mtp.cache import HeadCache
from paceline.drafters.mtp.checkpoint import HeadConfig
from paceline.drafters.networks.context import LONG_CONTEXT, DraftCost, Tapped
from paceline.drafters.networks.tensors import Array

_TIMED_CALLS = 7
_TIMED_STEPS = 3
"""Steps after the first one in the measurement of a step."""

_TIMED_ROWS = 64
"""Rows that are read before a draft in the measurement of a row."""


@dataclass(frozen=True, slots=True)
class ChainCost:
    """Seconds of a chain of drafts."""

    first: DraftCost
    """Of one draft, with the hidden states of one new token."""
    step: float
    """Of a further draft."""
    row: float = 0.0
    """Of a further token whose hidden states are read first."""

    def __call__(self, context: int, drafts: float, rows: int = 1) -> float:
        """Seconds of `drafts` >= 1 tokens at `context` tokens, the last `rows` >= 1 of them new."""
        return self.first(context) + self.row * (rows - 1) + self.step * (drafts - 1)


class Rows(NamedTuple):
    """Rows to append to a head's cache."""

    tapped: Tapped
    """[n, taps * d]: the target's hidden states of n tokens."""
    tokens: Sequence[int]
    """The n tokens that follow them, each one position later."""
    start: int
    """Position of the first hidden state."""


class DraftHead(Protocol):
    """A head opened for a target. Not thread-safe."""

    config: HeadConfig
    taps: tuple[int, ...]
    """Layers of the target whose hidden states it needs."""
    cost: ChainCost

    def new_cache(self) -> HeadCache[Any]:
        """An empty cache for a sequence."""
        ...

    def tapped(self, taps: Mapping[str, Array], rows: int) -> Tapped:
        """Hidden states of a call's first `rows` rows, [rows, taps * d].

        They stay valid when the engine runs its next call.
        """
        ...

    def concat(self, parts: Sequence[Tapped]) -> Tapped:
        """Concatenate along tokens: [n, taps * d]."""
        ...

    def prefill(self, cache: HeadCache[Any], rows: Rows) -> None:
        """Append rows to the cache, which has those before them, without drafting."""
        ...

    def draft(
        self,
        cache: HeadCache[Any],
        rows: Rows,
        limit: int,
        least: float,
        *,
        sampler: DraftSampler | None = None,
    ) -> tuple[list[int], list[float]]:
        """Append 1 row or more, and draft after the last one.

        Returns 1 to `limit` draft tokens, each the likeliest after those before it or the pick of
        `sampler`, and the probability of each. The chain ends where all drafts so far are right
        with less than the probability `least`. Drafted rows are not kept in the cache.
        """
        ...


def measure_cost(head: DraftHead, tapped: Callable[[int], Tapped]) -> ChainCost:
    """Measure a draft after next to nothing and at a long context, a further step and a row.

    `tapped` makes n rows of hidden states of any value.
    """
    cache = head.new_cache()
    base = _seconds(head, cache, tapped(1), 1)
    step = (_seconds(head, cache, tapped(1), 1 + _TIMED_STEPS) - base) / _TIMED_STEPS
    row = (_seconds(head, cache, tapped(_TIMED_ROWS), 1) - base) / (_TIMED_ROWS - 1)
    filled = head.new_cache()
    head.prefill(filled, Rows(tapped(LONG_CONTEXT), [0] * LONG_CONTEXT, 0))
    added = _seconds(head, filled, tapped(1), 1) - base
    first = DraftCost(base, max(added, 0.0) / LONG_CONTEXT)
    return ChainCost(first, max(step, 0.0), max(row, 0.0))


def _seconds(head: DraftHead, cache: HeadCache[Any], rows: Tapped, drafts: int) -> float:
    """Median seconds of a chain of `drafts` tokens after `rows`."""
    times = []
    for _ in range(_TIMED_CALLS + 1):  # the first one compiles
        started = perf_counter()
        head.draft(cache, Rows(rows, [0] * len(rows), len(cache)), drafts, 0.0)
        times.append(perf_counter() - started)
    return median(times[1:])
