"""The KV cache of a head for one sequence, and what a draft costs.

Invariant: a key is rotated to its token's position, so positions may have gaps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Self

from paceline_mlx.heads.parts import DeviceKV, evaluate
from paceline_mlx.hooks import Array

PREFILL_CHUNK = 512
"""Tokens of a prompt in one prefill call."""

LONG_CONTEXT = 2048
"""Tokens of context for the second measurement of a network's cost."""

_TIMED_CALLS = 5


class ContextCache:
    """A network's KV cache of one sequence, and hidden states that have no keys and values yet.

    Decoding only appends and truncates it.
    """

    def __init__(self, kv: DeviceKV) -> None:
        self.kv = kv
        """Rows after the last position are invalid."""
        self.positions: list[int] = []
        """Positions of the rows, ascending."""
        self.pending: list[Array] = []
        """[n, taps * d] each: hidden states of later tokens, in order and without gaps."""
        self.pending_start = 0
        """The position of the first pending token."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def pending_count(self) -> int:
        """Tokens in `pending`."""
        return sum(map(len, self.pending))

    def copy(self, position: int) -> Self:
        """An independent copy of what is before this position."""
        duplicate = type(self)(self.kv.copy())
        duplicate.positions, duplicate.pending = list(self.positions), list(self.pending)
        duplicate.pending_start = self.pending_start
        duplicate.truncate(position)
        return duplicate

    def truncate(self, position: int) -> None:
        """Drop the tokens from this position on."""
        while self.positions and self.positions[-1] >= position:
            self.positions.pop()
        kept = max(position - self.pending_start, 0)
        parts, self.pending = self.pending, []
        for part in parts:
            if kept > 0:
                self.pending.append(evaluate(part[:kept]))
                kept -= len(part)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of a forward pass, by context length."""

    base: float
    """Without context."""
    per_token: float = 0.0
    """Added per token of context."""
    max_context: int | None = None
    """Tokens of context that attention reads at most; None: all."""

    def __call__(self, context: int) -> float:
        """Seconds at `context` tokens."""
        attended = context if self.max_context is None else min(context, self.max_context)
        return self.base + self.per_token * attended


def median_seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(_TIMED_CALLS + 1):  # the first one compiles
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return median(times[1:])
