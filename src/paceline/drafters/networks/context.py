"""The KV cache of a drafter's network for one sequence, and the network's cost.

Imports neither OpenVINO nor MLX: hidden states, keys and values are arrays of the network's own
kind. Invariant: a key is rotated to its token's position, so positions may have gaps.
"""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

PREFILL_CHUNK = 512
"""Tokens of a prompt in one prefill call."""

LONG_CONTEXT = 2048
"""Tokens of context for the second measurement of a network's cost."""

Tapped = Any
"""[n, taps * d]: the target's hidden states of n tokens, all taps concatenated."""


class KVStorage(Protocol):
    """Keys and values of a context by layer; `ContextCache` has the number of valid rows."""

    def copy(self) -> Self:
        """An independent copy."""
        ...

    def first(self, tapped: Tapped, count: int) -> Tapped:
        """The first `count` rows of pending hidden states."""
        ...


S = TypeVar("S", bound=KVStorage)


class ContextCache(Generic[S]):
    """A network's KV cache of one sequence, and hidden states that have no keys and values yet.

    Decoding only appends and truncates it.
    """

    def __init__(self, kv: S) -> None:
        self.kv = kv
        """Rows after the last position are invalid."""
        self.positions: list[int] = []
        """Positions of the rows, ascending."""
        self.pending: list[Tapped] = []
        """Hidden states of later tokens, in order and without gaps."""
        self.pending_start = 0
        """The position of the first pending token."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def pending_count(self) -> int:
        """Tokens in `pending`."""
        return sum(map(len, self.pending))

    def copy(self, position: int) -> "ContextCache[S]":
        """An independent copy of what is before this position."""
        duplicate = ContextCache(self.kv.copy())
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
                self.pending.append(self.kv.first(part, kept))
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
