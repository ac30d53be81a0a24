"""Rules for rows that MLX's kernels may keep, and the calls that tell which of them it keeps.

MLX picks kernels by the number of rows. On Apple GPUs a product with one row takes another kernel
than one with several; a third begins at a number that depends on chip and matrix; attention has
its own for up to eight rows, or fewer if several heads share keys, and picks it by the number of
keys, too (`thresholds.py`). `probe.py` makes the calls.

Independent of MLX: a kernel is whatever gives a row its bits.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import perf_counter

from paceline.engines.rows import RowRange, RowRules
from paceline_mlx.thresholds import BACK, FEW_ROWS, MOST_ROWS, THRESHOLDS, drop_step

TRIED = (1, 2, 3, 4, 5, 6, 7, 8, MOST_ROWS)

_OFFSETS = (0, 1, 3)
"""First rows of the calls of attention, after the context: so a position has several of them."""

_AROUND = range(-9, 2)
"""The same around a number of keys at which a kernel may change."""

MODEL_CONTEXTS = (48, 6144)
"""Contexts of the whole model's calls; the long one is random, not computed."""

CONTEXTS = (48, 150, 300, 1100, 2300, 6144, 8300, 16500, 33000, 66000)
"""Contexts of calls of attention alone: one between any two neighbouring thresholds."""

_CONTEXTS_APART = 4
"""A context is less than this many times the one before. So a kernel that begins at some number of
rows times keys is seen by calls of `n` to `4n` rows: after one context some take it, others not."""

_POWERS = tuple(2**exponent for exponent in range(10, 17))
"""Numbers of keys where kernels change, or may in another version of MLX."""

_LONGEST_CALLS = 40
"""Positions after a context that compared calls may have."""

CANDIDATES = [
    RowRules(rows, rows, cuts=THRESHOLDS)
    for rows in (
        *(RowRange(1, max_rows) for max_rows in (MOST_ROWS, 8, 7, 6, 5, 4)),
        *(RowRange(2, max_rows) for max_rows in (8, 7, 6, 5, 4, 3)),
        *(RowRange(min_rows, 8) for min_rows in (3, 6, 8)),
        RowRange(2, 2),
    )
]
"""By ascending cost: of eight rows, plain decoding computes seven for nothing; of calls of two, a
block gains little."""

TOTALS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, MOST_ROWS)
"""Rows of the compared calls of several sequences. Attention has each sequence's own rows, so only
kernels of products may change between them: at 6 to 33 rows, by chip and matrix."""

SHARE = 8
"""Most rows of a sequence in those calls, so that there are several."""

Call = tuple[int, int]

RowBits = Mapping[Call, Sequence[bytes]]
"""Call -> the bits of its rows. All calls have the same tokens, keys and values."""

PREFILL = RowRange(1, 512)
"""Rows of a call of a prompt without logits: they are compared with no others."""

ANY = RowRules(RowRange(1, MOST_ROWS), PREFILL, cuts=THRESHOLDS)
"""If the number of rows makes no difference, or the user asked for fewer."""

ALONE = RowRules(RowRange(1, 1), PREFILL)
"""Where no numbers of rows agree: a draft's rows run one by one, so that it changes no token."""

_ANSWER, _PROMPT = (RowRange(rows, rows) for rows in FEW_ROWS)

FEW_SHAPES = RowRules(_ANSWER, _PROMPT, cuts=THRESHOLDS)
"""Of a model with `few_shapes`: all calls at a position have one shape."""


class Budget:
    """Ten seconds for all measurements when a model is opened, and how far they came."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._end = clock, clock() + 10
        self.keys = inf
        """Keys up to which calls were compared; `exact` is false for answers with more."""

    def left(self) -> float:
        return self._end - self._clock()


def candidates(
    *, drops_padding: bool, fused: Callable[[int], bool], attention: Sequence[RowBits]
) -> list[RowRules]:
    """Candidates that equal bits of the whole model would prove, by ascending cost.

    Args:
        drops_padding: whether the model's caches can drop the padding of a call.
        fused: whether one kernel computes all attention of a call of so many rows. Else products
            do, which may change kernels at any number of rows times keys: `_CONTEXTS_APART`.
        attention: bits of each kind of attention alone.
    """
    return [
        rules
        for rules in CANDIDATES
        if (rules.decode.least == 1 or drops_padding)
        and (
            rules.decode.most >= _CONTEXTS_APART * rules.decode.least
            or all(map(fused, range(rules.decode.least, rules.decode.most + 1)))
        )
        and all(agree(rules, bits) for bits in attention)
    ]


def agree(rules: RowRules, measured: RowBits) -> bool:
    """True if every position has the same bits in all calls that the rules allow."""
    known: dict[int, bytes] = {}
    for (count, position), row_bits in measured.items():
        for at, bits in enumerate(row_bits[: used(rules, count, position)], position):
            if known.setdefault(at, bits) != bits:
                return False
    return True


def used(rules: RowRules, count: int, position: int) -> int:
    """Rows that are read of a call of `count` rows at `position`; 0 if there is no such call.

    They may be fewer than its rows if it has the least: the others are padding.
    """
    rows = rules.decode
    if not rows.least <= count <= rows.most:
        return 0
    read = next(rows.split(count, position, rules.cuts)).stop
    return read if count in (read, rows.least) else 0


def shares(rows: RowRange, total: int) -> list[int]:
    """Rows of each sequence in a call of `total` rows; empty if there is no such call."""
    max_rows = min(rows.most, SHARE)
    sequences = max(-(-total // max_rows), 2)
    if total < sequences * rows.least:
        return []
    return [total * (at + 1) // sequences - total * at // sequences for at in range(sequences)]


def most_together(rows: RowRange, agrees: Callable[[list[int]], bool]) -> int:
    """The last of `TOTALS` up to which all calls of several sequences agree; 1 if none does.

    `agrees` gets the rows of each sequence in a call, and returns whether their bits are those of
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
    """Contexts after which calls are compared, ascending, away from thresholds.

    Instead of those that do not fit, the longest that does.
    """
    longest = max(context_length - _LONGEST_CALLS, 1)
    for keys in THRESHOLDS:
        if keys - _LONGEST_CALLS < longest < keys:
            longest = keys - _LONGEST_CALLS
    return sorted({min(context, longest) for context in contexts})


def attention_calls(context_length: int, window: int | None = None) -> list[Call]:
    """Calls of attention alone, with keys of all positions or with a sliding window of them."""
    around = {keys + offset for keys in _POWERS for offset in _AROUND}
    if window is not None and (step := drop_step(window)) is not None:
        first = window + BACK + step  # slots are dropped for the first time; `window`: first mask
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
