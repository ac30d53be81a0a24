"""What a drafter needs of an opened network, whatever computes it, and what is kept of a sequence.

Knows neither OpenVINO nor MLX. Features and rows are arrays of the network's own kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Generic, Protocol, Self, TypeVar

from paceline.drafters.dflash.checkpoint import Array, Config

LONG = 512
"""Rows of a prompt that are read at once."""

_TIMED = 5
_DEEP = 2048
"""Tokens of context behind which a block is timed again."""

Features = Any
"""[n, taps * d]: what the target showed of n tokens, all taps side by side."""


class Rows(Protocol):
    """Keys and values of a context, layer by layer. `Context` says how many of them count."""

    def copy(self) -> Self:
        """The same, for a sequence that goes its own way from here."""
        ...

    def first(self, features: Features, count: int) -> Features:
        """The first rows of features; of what waits for its own rows."""
        ...


R = TypeVar("R", bound=Rows)


class Context(Generic[R]):
    """What is known of one sequence: keys and values of its tokens.

    In decoding it is only extended and cut, never copied. A token's keys are turned to its
    position, so gaps do no harm: what was not seen is not there.
    """

    def __init__(self, rows: R) -> None:
        self.rows = rows
        """May have more rows than there are positions: those behind are forgotten."""
        self.positions: list[int] = []
        """The position of each row, ascending."""
        self.waiting: list[Features] = []
        """Features of the tokens behind those, as they came; they have no rows yet."""
        self.waits_from = 0
        """The position of the first that waits; there are no gaps between them."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def wait(self) -> int:
        """How many tokens wait."""
        return sum(map(len, self.waiting))

    def copy(self, position: int) -> "Context[R]":
        """The same for a sequence that shares the tokens before this position."""
        other = Context(self.rows.copy())
        other.positions, other.waiting = list(self.positions), list(self.waiting)
        other.waits_from = self.waits_from
        other.cut(position)
        return other

    def cut(self, position: int) -> None:
        """Forget the rows of this position and later ones."""
        while self.positions and self.positions[-1] >= position:
            self.positions.pop()
        kept = max(position - self.waits_from, 0)
        parts, self.waiting = self.waiting, []
        for part in parts:
            if kept > 0:
                self.waiting.append(self.rows.first(part, kept))
                kept -= len(part)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds that a block takes, by how much context there is."""

    short: float
    """Behind next to none."""
    per_token: float = 0.0
    """What each token of context adds."""
    most: int | None = None
    """Tokens of context that are looked at, at most; None: all."""

    def __call__(self, context: int) -> float:
        """Behind so many tokens."""
        looked_at = context if self.most is None else min(context, self.most)
        return self.short + self.per_token * looked_at


class Network(Protocol):
    """A checkpoint opened for a target. Not for several threads at once."""

    config: Config
    taps: tuple[int, ...]
    """Layers of the target whose hidden states it needs."""
    cost: DraftCost

    def context(self) -> Context[Any]:
        """Room for a new sequence's keys and values."""
        ...

    def features(self, taps: Mapping[str, Array], rows: int) -> Features:
        """The features of a block's first rows, from what an engine tapped.

        They stay what they are when the engine goes on.
        """
        ...

    def joined(self, parts: Sequence[Features]) -> Features:
        """Features one behind the other; of no parts, no rows."""
        ...

    def read(self, context: Context[Any], features: Features, start: int) -> None:
        """Add tokens to the context: their features, at positions from `start`."""
        ...

    def draft(
        self, context: Context[Any], token: int, position: int, features: Features, start: int
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Fill a block that begins with `token` at `position`; adds what is new to the context.

        Args:
            context: of the tokens before.
            token: the last token, whose features are not known yet.
            position: where it stands.
            features: of the newest tokens before it, not yet in the context.
            start: the position of the first of them.

        Returns:
            block_size - 1 tokens, and for each the chance that the network gives it.
        """
        ...


def measured(
    network: Network, features: Callable[[int], Features], window: int | None
) -> DraftCost:
    """What blocks take here, behind next to nothing and behind a long text.

    Args:
        network: opened, but for its cost.
        features: makes so many rows, whatever is in them.
        window: tokens of context that it looks at, at most; None: what its layers do.
    """
    layers = network.config.windows
    windows = [window, None if None in layers else max(each for each in layers if each is not None)]
    most = min((each for each in windows if each is not None), default=None)
    short = _block_seconds(network, network.context(), features(1))
    deep = _DEEP if most is None else min(_DEEP, most)
    context = network.context()
    network.read(context, features(deep), 0)
    further = _block_seconds(network, context, features(1)) - short
    return DraftCost(short, max(further, 0.0) / deep, most)


def _block_seconds(network: Network, context: Context[Any], one: Features) -> float:
    """The median of some blocks, each behind one token more."""
    times = []
    for _ in range(_TIMED + 1):  # the first also prepares
        at = len(context)
        started = perf_counter()
        list(network.draft(context, 0, at + 1, one, at)[0])
        times.append(perf_counter() - started)
    return median(times[1:])
