"""The `Network` protocol of DFlash, and the measurement of its cost."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from paceline.decoding.draft_sampling import DraftSampler
from paceline.drafters.dflash.checkpoint import Config
from paceline.drafters.networks.context import LONG_CONTEXT, ContextCache, DraftCost, Tapped
from paceline.drafters.networks.tensors import Array

_TIMED_CALLS = 5


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
        self,
        cache: ContextCache[Any],
        token: int,
        position: int,
        tapped: Tapped,
        start: int,
        *,
        sampler: DraftSampler | None = None,
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Append `tapped` to the cache and fill a block that begins with `token` at `position`.

        Args:
            cache: of the tokens before `start`.
            token: the last token, whose hidden states are not known yet.
            position: of `token`.
            tapped: hidden states of the newest tokens before it.
            start: the position of the first of them.
            sampler: picks the drafts; None: they are the likeliest.

        Returns:
            The block's draft tokens, and their probabilities.
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
    windows = [
        window,
        None if None in layers else max(width for width in layers if width is not None),
    ]
    max_context = min((width for width in windows if width is not None), default=None)
    base = _block_seconds(network, network.new_cache(), tapped(1))
    length = LONG_CONTEXT if max_context is None else min(LONG_CONTEXT, max_context)
    cache = network.new_cache()
    network.prefill(cache, tapped(length), 0)
    added = _block_seconds(network, cache, tapped(1)) - base
    return DraftCost(base, max(added, 0.0) / length, max_context)


def _block_seconds(network: Network, cache: ContextCache[Any], row: Tapped) -> float:
    """Median seconds of a block; the context grows by the token of `row` with every block."""
    times = []
    for _ in range(_TIMED_CALLS + 1):  # the first one compiles
        at = len(cache)
        started = perf_counter()
        list(network.draft(cache, 0, at + 1, row, at)[0])
        times.append(perf_counter() - started)
    return median(times[1:])
