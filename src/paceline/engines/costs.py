"""What a call costs on this machine, learnt from the calls that answers make.

Nothing is timed before an answer. A careful prior stands until calls were seen: the weights read
once at 20 GB/s, and a quarter of that for each further row, which is dearer than rows are in most
engines, so that a draft that is expected to gain does. Then two things are learnt apart:

    plain(context) = a + b * context     from calls of one row
    ratio(T) = c(T) / plain              from calls of T rows, against plain calls shortly before

The speed of a shared machine varies by 1.5 within minutes, so a ratio is that of neighbours in
time. It hardly depends on the context: attention reads the keys for each row. An example, of an
engine whose rows cost half of what the prior says:

    calls seen            1 x 10 ms    4 x 13.8 ms    the prior says 17.5 for 4 rows
    ratio(4)              1.75 -> 1.47 after 8 calls, 1.40 after 64
    ratio(8)              2.75 -> 2.3: of the number of rows nearest to it that was seen

Invariant: nothing here changes a token, only how many are drafted.
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
from paceline.storage.files import digest_of, read_json, write_json

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows of a cost table; costs between them are interpolated."""

MAX_ROWS = ROWS[-1]
"""Rows of the longest block that a policy may choose."""

_BYTES_PER_SECOND = 20e9
"""Speed at which weights are read, before any call; 10 GB/s (a small virtual machine) to 100."""

_ROW = 0.25
"""Cost of a further row in calls of one, before any call. 8 rows then take 2.75 calls:
ik_llama.cpp's take 2.6, and llama.cpp's 3.0 to 4.6."""

_PRIOR_CALLS = 8.0
"""Weight of the prior's ratio, in calls."""

_MAX_CALLS = 512.0
"""Weight at which older calls count less."""

_NEIGHBOURS = 32
"""Calls after a plain one in which a ratio is one of neighbours in time."""

_SPEED_KEPT = 0.5 ** (1 / 8)
"""Weight of the machine's speed after the next plain call."""

_MAX_RATIO = log(4.0)
"""A call further from what is expected, as a logarithm, was interrupted by something."""

_CHANGE = 1.03
"""Least change of a cost that is stored."""

_SEQUENCE_ROWS = 0.5
"""Cost of a sequence before any shared call, in rows."""

_MIN_ROW = 1 / 64
"""Least cost of a further row in calls of one, and least factor of a part of the prior."""

_SHARED_KEPT = 31 / 32
"""Weight of a shared call after the next one."""

_SHARED_PRIOR = 0.02
"""Weight of the proportions of the beginning, in calls."""

_FORM = 1
"""Version of what is stored."""

_CONTEXT, _ROUNDS = 192, 5
"""Tokens before the calls of `measure`, and calls of each number of rows."""


class Costs:
    """Seconds of a call by its rows and context."""

    def __init__(self, plain_seconds: float, stored: Mapping[str, Any] | None = None) -> None:
        """Begin with the prior, or with what an earlier process learnt.

        Args:
            plain_seconds: expected of a call of one row, before any was seen.
            stored: `state` of an earlier process.

        Raises ValueError, TypeError or KeyError for a damaged state.
        """
        # Of 1, x, x^2, y and x y, with y in seconds and x in 1,000 tokens of context: a line by
        # least squares. The prior counts as a tenth of a call at no context, and as no growth.
        self._line = np.array([0.1, 0.0, 1.0, 0.1 * plain_seconds, 0.0])
        self._ratios: dict[int, tuple[float, float]] = {}
        """Rows -> weight in calls, and weighted sum of logarithms of ratios over the prior's."""
        self._seen: set[int] = set()  # whose first call, which may prepare something, is over
        self._speed, self._since = 1.0, _NEIGHBOURS  # now, over the line; calls since a plain one
        if stored is not None:
            self._line = np.array([float(value) for value in stored["line"]])
            self._ratios = {
                int(rows): (float(weight), float(total))
                for rows, (weight, total) in stored["ratios"].items()
            }
            if self._line.shape != (5,) or not np.isfinite(self._line).all():
                raise ValueError("the line of plain calls has other numbers than five")
            self.table()

    @property
    def state(self) -> dict[str, Any]:
        """What was learnt, for JSON."""
        return {"line": self._line.tolist(), "ratios": {**self._ratios}}

    @property
    def known(self) -> bool:
        """Whether calls were seen, here or by an earlier process."""
        return bool(self._ratios) or self._line[0] > 1

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a call of one sequence.

        Args:
            rows: its rows, 1 or more.
            context: tokens before them.
            seconds: time of the engine's call.
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
        """The costs as they are known now."""
        start, slope = self._fit()
        ratios = {rows: self._ratio(rows) for rows in ROWS}
        return CostTable(
            {rows: start * ratio for rows, ratio in ratios.items()},
            0,
            {rows: slope / 1000 * ratio for rows, ratio in ratios.items()},
        )

    def _fit(self) -> tuple[float, float]:
        """Seconds of a plain call without context, and per 1,000 tokens of it."""
        count, x, xx, y, xy = self._line
        # The slope of calls at one context alone is not known: the ridge keeps it at 0.
        slope = max((count * xy - x * y) / max(count * xx - x * x, 1e-9), 0.0)
        start = (y - slope * x) / count
        if start <= 0:  # no call takes less than nothing
            start, slope = y / count / 2, y / max(x, 1e-9) / 2
        return float(start), float(slope)

    def _plain(self, context: int) -> float:
        start, slope = self._fit()
        return start + slope * context / 1000

    def _ratio(self, rows: int) -> float:
        """Cost of a call of `rows` rows in plain ones."""
        if rows == 1 or not self._ratios:
            return _prior_ratio(rows)
        # Of the numbers of rows that were seen, near ones say more of this one than far ones.
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
    """Seconds of a call of several sequences: fixed + row * rows + sequence * others.

    `others` are the sequences after the first, whose keys and values are read, too. The three
    numbers begin with those of calls of one sequence, and follow the last calls by least squares
    of relative errors. What calls leave open keeps the proportions of the beginning: while all
    have as many rows as sequences, they cannot tell a busy machine from costly sequences.
    """

    def __init__(self, alone: CostTable, *, shared: bool = True) -> None:
        """Begin with the costs of one sequence.

        `shared` is `Engine.shares_calls`; without, every sequence has the fixed cost.
        """
        row = max(alone.per_row, alone(1) * _MIN_ROW)  # a measured table may be flat
        fixed = max(alone(1) - row, row)
        self._prior = np.array([fixed, row, row * _SEQUENCE_ROWS if shared else fixed])
        self._numbers = self._prior
        # Of shares of the prior's three parts in each call, over its seconds: see `observe`.
        self._gram, self._shares, self._calls = np.zeros((3, 3)), np.zeros(3), 0.0

    @property
    def row(self) -> float:
        """Seconds of one more row."""
        return float(self._numbers[1])

    def __call__(self, rows: int, sequences: int) -> float:
        """Seconds of a call."""
        return float(self._numbers @ (1, rows, sequences - 1))

    def observe(self, rows: int, sequences: int, seconds: float) -> None:
        """Learn from a call: factors of the prior's parts, with shares @ factors near 1."""
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
    """Costs of an engine with a model, in a file named for everything that they depend on."""

    def __init__(self, engine: Engine, fingerprint: str, weights_bytes: int, folder: Path) -> None:
        """Read what an earlier process learnt, if anything; a damaged file is as none.

        Args:
            engine: the engine with its model.
            fingerprint: identity of the model's weights.
            weights_bytes: size of the model's files.
            folder: of stored measurements.
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
        """Keep what was learnt for later processes, if it changed; a failing disk keeps nothing."""
        table = self.table()
        pairs = [(table(rows), self._stored(rows)) for rows in ROWS]
        if all(max(new / old, old / new) < _CHANGE for new, old in pairs):
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self.state)
            self._stored = table


def measure(engine: Engine, costs: Costs) -> None:
    """Make calls for the costs to learn from: every number of rows in turns.

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
