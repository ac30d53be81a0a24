"""The `Network` protocol of DFlash, its KV cache of one sequence, and its cost.

Imports neither OpenVINO nor MLX: hidden states, keys and values are arrays of the network's own
kind. Invariant: a key is rotated to its token's position, so positions may have gaps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Generic, Protocol, Self, TypeVar

from paceline.drafters.dflash.checkpoint import Array, Config

PREFILL_CHUNK = 512
"""Tokens of a prompt in one prefill call."""

_TIMED_CALLS = 5
_LONG_CONTEXT = 2048
"""Tokens of context for the second measurement of a block's cost."""

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
        """The position of each row, ascending."""
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
        other = ContextCache(self.kv.copy())
        other.positions, other.pending = list(self.positions), list(self.pending)
        other.pending_start = self.pending_start
        other.truncate(position)
        return other

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
    """Added by each token of context."""
    max_context: int | None = None
    """Tokens of context that attention reads at most; None: all."""

    def __call__(self, context: int) -> float:
        """Seconds at `context` tokens."""
        attended = context if self.max_context is None else min(context, self.max_context)
        return self.base + self.per_token * attended


class Network(Protocol):
    """A checkpoint opened for a target. Not thread-safe."""

    config: Config
    taps: tuple[int, ...]
    """Layers of the target whose hidden states it needs."""
    cost: DraftCost

    def new_cache(self) -> ContextCache[Any]:
        """An empty cache for a sequence."""
        ...

    def tapped(self, taps: Mapping[str, Array], rows: int) -> Tapped:
        """Hidden states of a call's first `rows` rows, [rows, taps * d].

        They stay valid when the engine runs its next call.
        """
        ...

    def concat(self, parts: Sequence[Tapped]) -> Tapped:
        """Concatenate along tokens: [n, taps * d]; without parts [0, taps * d]."""
        ...

    def prefill(self, cache: ContextCache[Any], tapped: Tapped, start: int) -> None:
        """Append keys and values of `tapped`, at positions from `start`, to the cache."""
        ...

    def draft(
        self, cache: ContextCache[Any], token: int, position: int, tapped: Tapped, start: int
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Append `tapped` to the cache and fill a block that begins with `token` at `position`.

        Args:
            cache: of the tokens before `start`.
            token: the last token, whose hidden states are not known yet.
            position: of `token`.
            tapped: hidden states of the newest tokens before it.
            start: the position of the first of them.

        Returns:
            block_size - 1 draft tokens, and the probability of each.
        """
        ...


def measure_cost(
    network: Network, tapped: Callable[[int], Tapped], window: int | None
) -> DraftCost:
    """Measure a block's cost at one token of context and at a long context.

    Args:
        network: opened, except for its cost.
        tapped: makes n rows of hidden states of any value.
        window: tokens of context in attention at most; None: as the layers have it.
    """
    layers = network.config.windows
    windows = [window, None if None in layers else max(each for each in layers if each is not None)]
    max_context = min((each for each in windows if each is not None), default=None)
    base = _block_seconds(network, network.new_cache(), tapped(1))
    length = _LONG_CONTEXT if max_context is None else min(_LONG_CONTEXT, max_context)
    cache = network.new_cache()
    network.prefill(cache, tapped(length), 0)
    added = _block_seconds(network, cache, tapped(1)) - base
    return DraftCost(base, max(added, 0.0) / length, max_context)


def _block_seconds(network: Network, cache: ContextCache[Any], one: Tapped) -> float:
    """Median seconds of a block, each at one more token of context."""
    times = []
    for _ in range(_TIMED_CALLS + 1):  # the first one compiles
        at = len(cache)
        started = perf_counter()
        list(network.draft(cache, 0, at + 1, one, at)[0])
        times.append(perf_counter() - started)
    return median(times[1:])
