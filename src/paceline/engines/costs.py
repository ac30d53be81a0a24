"""Learns the cost of forward passes on this machine from those of the responses.

Nothing is timed before a response. At first a cautious prior applies: the time to read the weights
once at 20 GB/s, and a quarter of that per further row. Rows are cheaper in most engines, so a draft
that is expected to help does. Two quantities are then learned separately:

    plain(context) = a + b * context     from passes of one row
    ratio(T) = c(T) / plain              from passes of T rows, against plain ones shortly before

The speed of a shared machine varies by a factor of 1.5 within minutes, so a ratio compares passes
that are close in time. It hardly depends on the context: attention reads the keys for each row. An
example, for an engine whose rows cost half of the prior's:

    passes observed       1 x 10 ms    4 x 13.8 ms    the prior's cost of 4 rows is 17.5 ms
    ratio(4)              1.75 -> 1.47 after 8 passes, 1.40 after 64
    ratio(8)              2.75 -> 2.3: from the nearest observed number of rows

Invariant: costs never change a token, only the number of draft tokens.
"""

import contextlib
from collections.abc import Mapping
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block
from paceline.engines.base import Engine
from paceline.errors import ModelError
from paceline.storage.files import digest_of, read_json, store_json

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Row counts of a cost table; costs between them are interpolated."""

MAX_ROWS = ROWS[-1]
"""Rows of the longest block that a policy may choose."""

_BYTES_PER_SECOND = 20e9
"""Prior read speed of weights; machines have 10 (a small virtual one) to 100 GB/s."""

_ROW = 0.25
"""Prior cost of a further row, in one-row passes. 8 rows then take as long as 2.75 passes:
ik_llama.cpp's take 2.6, and llama.cpp's 3.0 to 4.6."""

_PRIOR_CALLS = 8.0
"""Weight of the prior's ratio, in passes."""

_MAX_CALLS = 512.0
"""Weight above which older passes are discounted."""

_NEIGHBOURS = 32
"""Maximum passes after a plain one for a ratio to compare with it."""

_SPEED_KEPT = 0.5 ** (1 / 8)
"""Weight of the machine's current speed after the next plain pass."""

_MAX_RATIO = log(4.0)
"""A pass further from its expected cost, as a logarithm, was interrupted."""

_CHANGE = 1.03
"""Minimum change of a cost that is stored."""

_SEQUENCE_ROWS = 0.5
"""Cost of a sequence before any shared pass, in rows."""

_MIN_ROW = 1 / 64
"""Minimum cost of a further row in one-row passes, and minimum factor of a part of the prior."""

_SHARED_KEPT = 31 / 32
"""Weight of a shared pass after the next one."""

_SHARED_PRIOR = 0.02
"""Weight of the initial proportions, in passes."""

_FORM = 1
"""Version of the stored format."""

_CONTEXT, _ROUNDS = 192, 5
"""Tokens before the passes of `measure`, and passes per number of rows."""


class Costs:
    """Seconds per forward pass, by rows and context."""

    def __init__(self, plain_seconds: float, stored: Mapping[str, Any] | None = None) -> None:
        """Begin with the prior, or with the state saved by an earlier process.

        Args:
            plain_seconds: prior of a pass of one row.
            stored: `state` of an earlier process.

        Raises ValueError, TypeError or KeyError for a damaged state.
        """
        # Sums of 1, x, x^2, y and x y, with y in seconds and x in 1,000 tokens of context: a linear
        # least-squares fit. The prior counts as a tenth of a pass at no context, and as no growth.
        self._line = np.array([0.1, 0.0, 1.0, 0.1 * plain_seconds, 0.0])
        self._ratios: dict[int, tuple[float, float]] = {}
        """Rows -> weight in passes, and weighted sum of logarithms of ratios over the prior's."""
        self._seen: set[int] = set()  # rows whose first pass, which may include setup, is over
        self._speed, self._since = 1.0, _NEIGHBOURS  # now, over the line; passes since a plain one
        if stored is not None:
            self._line = np.array([float(value) for value in stored["line"]])
            self._ratios = {
                int(rows): (float(weight), float(total))
                for rows, (weight, total) in stored["ratios"].items()
            }
            if self._line.shape != (5,) or not np.isfinite(self._line).all():
                raise ValueError("the line of plain passes does not have five numbers")
            self.table()

    @property
    def state(self) -> dict[str, Any]:
        return {"line": self._line.tolist(), "ratios": {**self._ratios}}

    @property
    def is_known(self) -> bool:
        """True if passes were observed, by this process or an earlier one."""
        return bool(self._ratios) or self._line[0] > 1

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a forward pass of one sequence.

        Args:
            rows: its rows, 1 or more.
            context: tokens before them.
            seconds: time in the engine.
        """
        if rows not in self._seen or not seconds > 0:
            self._seen.add(rows)
            return
        self._since += 1
        expected = self._plain(context) * self._speed
        if rows == 1:
            ratio = min(max(seconds / expected, exp(-_MAX_RATIO)), exp(_MAX_RATIO))
            self._speed *= ratio ** (1 - _SPEED_KEPT)
            x, y = context / 1000, ratio * expected
            keep = min(1.0, _MAX_CALLS / self._line[0])
            self._line = keep * self._line + np.array([1.0, x, x * x, y, x * y])
            self._since = 0
        elif self._since <= _NEIGHBOURS:
            found = log(seconds / expected / _prior_ratio(rows))
            weight, total = self._ratios.get(rows, (0.0, 0.0))
            keep = min(1.0, _MAX_CALLS / weight) if weight else 1.0
            found = min(max(found, -_MAX_RATIO), _MAX_RATIO)
            self._ratios[rows] = keep * weight + 1, keep * total + found

    def table(self) -> CostTable:
        start, slope = self._fit()
        ratios = {rows: self._ratio(rows) for rows in ROWS}
        return CostTable(
            {rows: start * ratio for rows, ratio in ratios.items()},
            0,
            {rows: slope / 1000 * ratio for rows, ratio in ratios.items()},
        )

    def _fit(self) -> tuple[float, float]:
        """Return the seconds of a plain pass without context, and per 1,000 tokens of context."""
        count, x, xx, y, xy = self._line
        # Passes at a single context do not determine the slope: the ridge keeps it at 0.
        slope = max((count * xy - x * y) / max(count * xx - x * x, 1e-9), 0.0)
        start = (y - slope * x) / count
        if start <= 0:  # no pass takes negative time
            start, slope = y / count / 2, y / max(x, 1e-9) / 2
        return float(start), float(slope)

    def _plain(self, context: int) -> float:
        start, slope = self._fit()
        return start + slope * context / 1000

    def _ratio(self, rows: int) -> float:
        """Return the cost of a pass of `rows` rows, in plain passes."""
        if rows == 1 or not self._ratios:
            return _prior_ratio(rows)
        # The nearest observed row counts are the best evidence.
        weight = total = 0.0
        for other, (calls, sum_) in self._ratios.items():
            nearness = exp(-4 * abs(log(other / rows)))
            weight, total = weight + calls * nearness, total + sum_ * nearness
        near = min(self._ratios, key=lambda other: abs(log(other / rows)))
        calls, sum_ = self._ratios[near]
        if weight < 1:  # all were far: the nearest is the best guess
            weight, total = calls, sum_
        return _prior_ratio(rows) * exp(total / (weight + _PRIOR_CALLS))


def _prior_ratio(rows: int) -> float:
    return 1 + _ROW * (rows - 1)


class SharedCosts:
    """Seconds of a pass of several sequences: fixed + row * rows + sequence * others.

    `others` are the sequences after the first; their keys and values are read as well. The three
    numbers begin with those of one-sequence passes, and follow recent passes by least squares of
    relative errors. Numbers that the passes do not determine keep their initial proportions: while
    all passes have one row per sequence, a busy machine looks like costly sequences.
    """

    def __init__(self, alone: CostTable, *, shared: bool = True) -> None:
        """Begin with the costs of one sequence.

        `shared` is `Engine.shares_calls`; without it, every sequence has the fixed cost.
        """
        row = max(alone.per_row, alone(1) * _MIN_ROW)  # a measured table may be flat
        fixed = max(alone(1) - row, row)
        self._prior = np.array([fixed, row, row * _SEQUENCE_ROWS if shared else fixed])
        self._numbers = self._prior
        # Shares of the prior's three parts in the seconds of each pass: see `observe`.
        self._gram, self._shares, self._calls = np.zeros((3, 3)), np.zeros(3), 0.0

    @property
    def row(self) -> float:
        return float(self._numbers[1])

    def __call__(self, rows: int, sequences: int) -> float:
        return float(self._numbers @ (1, rows, sequences - 1))

    def observe(self, rows: int, sequences: int, seconds: float) -> None:
        """Learn from a pass: factors of the prior's parts, with shares @ factors near 1."""
        shares = self._prior * (1, rows, sequences - 1) / max(seconds, 1e-9)
        self._gram = _SHARED_KEPT * self._gram + np.outer(shares, shares)
        self._shares = _SHARED_KEPT * self._shares + shares
        self._calls = _SHARED_KEPT * self._calls + 1
        level = self._calls / self._shares.sum()  # if the prior's proportions were right
        pull = _SHARED_PRIOR / level**2
        factors = np.linalg.solve(
            self._gram + pull * np.eye(3), self._shares + pull * level * np.ones(3)
        )
        self._numbers = self._prior * np.maximum(factors, level * _MIN_ROW)


class StoredCosts(Costs):
    """Costs of an engine with a model, in a file named after everything that they depend on."""

    def __init__(self, engine: Engine, fingerprint: str, weights_bytes: int, folder: Path) -> None:
        """Read the costs of an earlier process, if any; a damaged file is ignored.

        Args:
            engine: the engine with its model.
            fingerprint: identity of the model's weights.
            weights_bytes: size of the model's files.
            folder: the folder for stored measurements.
        """
        depends = {**engine.describe(), "model": fingerprint, "form": str(_FORM)}
        self._path = folder / f"{digest_of(sorted(depends.items()))}.costs"
        seconds = 0.001 + weights_bytes / _BYTES_PER_SECOND
        try:
            super().__init__(seconds, read_json(self._path))
        except (ModelError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
            super().__init__(seconds)
        self._stored = self.table()

    def store(self) -> None:
        """Save the costs for later processes if they changed; disk errors are ignored."""
        table = self.table()
        pairs = [(table(rows), self._stored(rows)) for rows in ROWS]
        if all(max(new / old, old / new) < _CHANGE for new, old in pairs):
            return
        if store_json(self._path, self.state):
            self._stored = table


def measure(engine: Engine, costs: Costs) -> None:
    """Run forward passes for the costs to learn from: every number of rows in turn.

    Raises CacheFull if there are no slots for them.
    """
    room = min(engine.context_length, engine.free_slots) - engine.min_rows
    rows = [count for count in ROWS if count <= room // 2] or [1]
    context = max(min(_CONTEXT, room - rows[-1]), 1)
    tokens = np.random.default_rng(0).integers(0, engine.vocab_size, context + rows[-1]).tolist()
    with contextlib.closing(engine.open()) as sequence:
        engine.step([(sequence, Block(tokens[:context], 0, prefill=True))])
        sequence.commit(context)
        for _ in range(1 + _ROUNDS):
            for count in rows:
                block = Block(tokens[context:][:count], count)
                costs.observe(count, context, engine.step([(sequence, block)]).seconds)
