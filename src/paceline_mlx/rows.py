"""Candidate rules for rows, and the forward passes that decide which of them MLX's kernels satisfy.

MLX picks kernels by the number of rows. On Apple GPUs, matrix products have one kernel for one row,
another for several, and a third starting at a number that depends on chip and matrix. Attention has
its own for up to eight rows, or fewer if several heads share keys; it also depends on the number of
keys (`thresholds.py`). `probe.py` runs the passes.

Does not import MLX: only the bits of rows are compared.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import perf_counter
from typing import Any

from paceline.engines.rows import RowRange, RowRules
from paceline.errors import InvalidRequest
from paceline.options import FloatRange
from paceline_mlx.thresholds import BACK, FEW_ROWS, MAX_ROWS, THRESHOLDS, drop_step

TRIED = (1, 2, 3, 4, 5, 6, 7, 8, MAX_ROWS)

_OFFSETS = (0, 1, 3)
"""Offsets of attention calls after a context, so that several calls include the same position."""

_AROUND = range(-9, 2)
"""Such offsets around a number of keys where the kernel may change."""

MODEL_CONTEXTS = (48, 6144)
"""Contexts of the whole model's forward passes; the long one has random keys."""

CONTEXTS = (48, 150, 300, 1100, 2300, 6144, 8300, 16500, 33000, 66000)
"""Contexts for attention alone: at least one between any two adjacent thresholds."""

_CONTEXTS_APART = 4
"""Each context is less than this factor times the one before. So passes of `n` to `4n` rows reveal
a kernel that begins at some rows * keys: after one of the contexts, only some of them use it."""

_POWERS = tuple(2**exponent for exponent in range(10, 17))
"""Numbers of keys where kernels change, or could change in another version of MLX."""

_MAX_POSITIONS = 40
"""Maximum positions after a context in compared passes."""

CANDIDATES = [
    RowRules(rows, rows, cuts=THRESHOLDS)
    for rows in (
        *(RowRange(1, max_rows) for max_rows in (MAX_ROWS, 8, 7, 6, 5, 4)),
        *(RowRange(2, max_rows) for max_rows in (8, 7, 6, 5, 4, 3)),
        *(RowRange(min_rows, 8) for min_rows in (3, 6, 8)),
        RowRange(2, 2),
    )
]
"""By ascending cost: with passes of eight rows, plain decoding wastes seven; with passes of two, a
block saves little."""

TOTALS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, MAX_ROWS)
"""Total rows of the compared passes with several sequences. Attention runs per sequence, so only
matrix products may change kernels: at 6 to 33 rows, by chip and matrix."""

SHARE = 8
"""Maximum rows per sequence in those passes, so that each has several sequences."""

Call = tuple[int, int]

RowBits = Mapping[Call, Sequence[bytes]]
"""(Rows, position) of a call -> the bits of its rows. All have the same tokens, keys and values."""

PREFILL = RowRange(1, 512)
"""Rows of a prefill pass without logits; their bits are not compared."""

ANY = RowRules(RowRange(1, MAX_ROWS), PREFILL, cuts=THRESHOLDS)
"""Rules if the number of rows makes no difference, or if the user sets `min_rows` to 1."""

ALONE = RowRules(RowRange(1, 1), PREFILL)
"""Rules if no numbers of rows agree: a block's rows run one by one, so drafts change no token."""

_ANSWER, _PROMPT = (RowRange(rows, rows) for rows in FEW_ROWS)

FEW_SHAPES = RowRules(_ANSWER, _PROMPT, cuts=THRESHOLDS)
"""Rules for a model with `few_shapes`: all passes at a position have the same shape."""


_COMPARED = 7
"""Positions that calls of different sizes compare."""

_MEASURED_SECONDS = 2.0
"""Time limit for starting another context."""


SECONDS = "PACELINE_MLX_SECONDS"
"""Environment variable with another time limit of a `Budget`, in seconds."""


class Budget:
    """A time limit, 10 s by default, for all measurements of an opening model; their progress."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        """Start now. Raises InvalidRequest if the environment has an invalid limit."""
        try:
            self.seconds = float(FloatRange(0)(os.environ.get(SECONDS, "10")))
        except ValueError as error:
            raise InvalidRequest(f"{SECONDS}: {error}") from error
        self._clock, self._end = clock, clock() + self.seconds
        self.keys = inf
        """Largest compared number of keys; responses with more are not `exact`."""

    def left(self) -> float:
        return self._end - self._clock()


def candidates(
    *, drops_padding: bool, fused: Callable[[int], bool], attention: Sequence[RowBits]
) -> list[RowRules]:
    """Return the candidates that the whole model can confirm, by ascending cost.

    `drops_padding`: the model's caches can drop the padding of a pass. `fused`: one kernel computes
    all attention of a pass with this number of rows. Else matrix products do; they may change
    kernels at any rows * keys (`_CONTEXTS_APART`). `attention`: bits of each kind of attention.
    """
    return [
        rules
        for rules in CANDIDATES
        if (rules.decode.min_rows == 1 or drops_padding)
        and (
            rules.decode.max_rows >= _CONTEXTS_APART * rules.decode.min_rows
            or all(map(fused, range(rules.decode.min_rows, rules.decode.max_rows + 1)))
        )
        and all(agree(rules, bits) for bits in attention)
    ]


def agree(rules: RowRules, measured: RowBits) -> bool:
    """Return True if every position is bit-identical in all calls that the rules allow."""
    known: dict[int, bytes] = {}
    for (count, position), row_bits in measured.items():
        for at, bits in enumerate(row_bits[: used(rules, count, position)], position):
            if known.setdefault(at, bits) != bits:
                return False
    return True


def used(rules: RowRules, count: int, position: int) -> int:
    """Return the rows that are read in a call of `count` rows at `position`; 0 if not allowed.

    This may be fewer than `count` if that is the minimum: the others are padding.
    """
    rows = rules.decode
    if not rows.min_rows <= count <= rows.max_rows:
        return 0
    read = next(rows.split(count, position, rules.cuts)).stop
    return read if count in (read, rows.min_rows) else 0


def shares(rows: RowRange, total: int) -> list[int]:
    """Split `total` rows of a pass among its sequences; empty if there is no such pass."""
    max_rows = min(rows.max_rows, SHARE)
    sequences = max(-(-total // max_rows), 2)
    if total < sequences * rows.min_rows:
        return []
    return [total * (at + 1) // sequences - total * at // sequences for at in range(sequences)]


def max_shared_sequences(rows: RowRange, agrees: Callable[[list[int]], bool]) -> int:
    """Return the largest of `TOTALS` such that it and all smaller ones agree; 1 if none does.

    `agrees` gets the rows of each sequence in a pass, and returns whether they are bit-identical to
    each sequence alone.
    """
    best = 1
    for total in TOTALS:
        counts = shares(rows, total)
        if counts and not agrees(counts):
            break
        best = total if counts else best
    return best


def model_contexts(context_length: int, contexts: Sequence[int] = MODEL_CONTEXTS) -> list[int]:
    """Return context lengths for comparing passes, ascending, away from thresholds.

    Contexts that are too long are replaced with the longest that is not.
    """
    longest = max(context_length - _MAX_POSITIONS, 1)
    for keys in THRESHOLDS:
        if keys - _MAX_POSITIONS < longest < keys:
            longest = keys - _MAX_POSITIONS
    return sorted({min(context, longest) for context in contexts})


def attention_calls(context_length: int, window: int | None = None) -> list[Call]:
    """Return the calls of attention alone, over all positions or over a sliding window."""
    around = {keys + offset for keys in _POWERS for offset in _AROUND}
    if window is not None and (step := drop_step(window)) is not None:
        first = window + BACK + step  # where slots are first dropped; masks begin at `window`
        around |= {at + offset for at in (window, first, first + step) for offset in _AROUND}
    after = {
        context + offset
        for context in model_contexts(context_length, CONTEXTS)
        for offset in _OFFSETS
    }
    return [
        (count, position)
        for position in sorted(around | after)
        for count in TRIED
        if position >= 0 and position + count <= context_length
    ]


def measure_rules(prober: Any, candidates: Sequence[RowRules]) -> RowRules | None:
    """Return the first candidate whose calls give the same bits after each context, or None.

    `prober` runs one sequence with the same tokens at every position. `contexts` are the keys
    before the compared calls, and `room` is the number of positions. `prefill(length)` begins a
    sequence; `rows(length, count, outputs)` runs `count` rows after it in one call, and returns
    logits of the first `outputs` rows, [outputs, vocab] float32. After `_MEASURED_SECONDS` the
    first context is compared alone.
    """
    started = perf_counter()

    def holds(rows: RowRange) -> bool:
        for context in prober.contexts:
            if context != prober.contexts[0] and perf_counter() - started > _MEASURED_SECONDS:
                break
            prober.prefill(context)
            if not _equal(prober, context, rows):
                return False
        return True

    return next((rules for rules in candidates if holds(rules.decode)), None)


def _equal(prober: Any, context: int, rows: RowRange) -> bool:
    """Return True if calls of several sizes in `rows` give the same bits after a context."""
    min_rows, max_rows = rows.min_rows, min(rows.max_rows, prober.room - context)
    if max_rows < min_rows:
        return False
    expected = _bits(prober, context, max_rows)
    # At other places in calls of one size.
    if min_rows > 1 and _bits(prober, context + 1, min_rows)[:-1] != expected[1:]:
        return False
    sizes = {min_rows, min_rows + 1, 2 * min_rows + 1, *TRIED} & {*range(min_rows, max_rows)}
    return all(_bits(prober, context, size) == expected for size in sorted(sizes))


def _bits(prober: Any, start: int, size: int) -> Sequence[bytes]:
    """Return the bits of `_COMPARED` positions that begin at `start`, from calls of `size` rows."""
    bits: list[bytes] = []
    while len(bits) < _COMPARED:
        logits = prober.rows(start + len(bits), size, min(size, _COMPARED))
        bits += [row.tobytes() for row in logits]
    return bits[:_COMPARED]
