"""c(T): seconds per forward pass of T rows of one sequence, which grows with its context.

c(T) decides whether speculation is faster. A block of T rows brings 1 + p + ... + p^(T-1) tokens on
average, where p is the probability that a draft token is accepted after those before it were. In
the ZAYA experiment, the seed of this project, a forward pass took 112 ms at T = 1 and 499 ms at
T = 4: generating four tokens one at a time was faster.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds per forward pass, measured for some T; linear between and beyond them.

    Raises ValueError if `seconds` is empty, an entry is not T >= 1 -> seconds > 0, or `per_token`
    and `seconds` differ in their T.
    """

    seconds: Mapping[int, float]
    """T -> seconds, measured. Made non-decreasing: one more row never makes a pass cheaper, so a
    lower measurement was noise."""
    context: int = 0
    """Tokens of context before the measured blocks."""
    per_token: Mapping[int, float] = field(default_factory=dict)
    """T -> seconds per further token of context, which attention reads for each row. Empty: not
    measured."""

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("a cost table needs at least one measured T")
        for rows, cost in self.seconds.items():
            if rows < 1 or not cost > 0:
                raise ValueError(f"cost of {rows} rows is {cost}; expected rows >= 1, seconds > 0")
        if self.per_token and self.per_token.keys() != self.seconds.keys():
            raise ValueError("per_token has other rows than seconds; expected the same, or none")
        order = sorted(self.seconds)
        rising = accumulate((self.seconds[t] for t in order), max)
        object.__setattr__(self, "seconds", dict(zip(order, rising, strict=True)))

    def __call__(self, rows: int) -> float:
        known = list(self.seconds)
        at = min(bisect_left(known, rows), len(known) - 1)
        if at == 0 or known[at] == rows:
            return self.seconds[known[at]]
        left, right = known[at - 1], known[at]
        slope = (self.seconds[right] - self.seconds[left]) / (right - left)
        return self.seconds[left] + slope * (rows - left)

    def by_rows(self, max_rows: int) -> list[float]:
        """Return the seconds per forward pass of 0 to `max_rows` rows."""
        return [0.0, *map(self, range(1, max_rows + 1))]

    @property
    def per_row(self) -> float:
        """Mean seconds per further row, over the measured range."""
        rows, seconds = list(self.seconds), list(self.seconds.values())
        return (seconds[-1] - seconds[0]) / max(rows[-1] - rows[0], 1)

    def at_context(self, context: int) -> "CostTable":
        """Return the costs at a context of `context` tokens, at least half of the measured ones."""
        further = context - self.context
        return CostTable(
            {
                rows: max(seconds + further * self.per_token.get(rows, 0.0), seconds / 2)
                for rows, seconds in self.seconds.items()
            },
            context,
        )

    def speed_up(self, rows: int, chance: float) -> float:
        """Return the speed relative to plain decoding: (1 + p + ... + p^(T-1)) c(1) / c(T)."""
        return sum(chance**at for at in range(rows)) * self(1) / self(rows)

    def break_even(self, rows: int) -> float | None:
        """Return the p where `speed_up` is 1, or None if it is less even at p = 1."""
        if self.speed_up(rows, 1.0) < 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(60):  # bisection
            middle = (low + high) / 2
            if self.speed_up(rows, middle) < 1:
                low = middle
            else:
                high = middle
        return high

    def best(self, chance: float) -> tuple[int, float]:
        """Return the T with the largest speed-up at a given p, and the speed-up; T = 1 is plain."""
        options = {rows: self.speed_up(rows, chance) for rows in (1, *self.seconds)}
        rows = max(options, key=lambda count: options[count])
        return rows, options[rows]
