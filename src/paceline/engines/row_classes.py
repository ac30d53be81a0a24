"""Row classes: numbers of rows in a call for which a row of logits has the same bits.

Runtimes choose kernels by the rows of a call, and kernels add in different orders. Two calls whose
numbers of rows are in one class give a position the same bits. So a *role* keeps to one class:

    prompt of 100 tokens, prefill 64-512     one call of 100 rows
    prompt of 40 tokens, prefill 64-512      one call of 64 rows: 40, and 24 of padding
    answer, decode 1-16                      1 row, or 1 + a draft of up to 15, as it comes
    a draft of 20                            calls of 16 and 5 rows

One row alone is the cheapest call of plain decoding, and the most likely to be a class of its own:
with one row there is less to divide among threads, so a kernel may divide keys, and sums change.
Whether it does depends on the number of keys. A binding knows its library's rule (`may_be_single`),
and single rows are measured where it allows them. Elsewhere a call has at least two.

`measure` tries candidates in the order of their cost. It is independent of runtimes: a `Prober`
makes the calls. A measurement proves nothing for what it did not run: other threads, another
processor, longer contexts. And a difference is easily missed: activations are rounded to 8 bits,
which hides nearly all that is small, so that one row in eight differed where another kernel had
run. So single rows are compared in runs, in which a difference stays.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol

from paceline.decoding.types import Logits
from paceline.errors import ModelError
from paceline.storage.files import read_json, write_json

_CONTEXT = 40
"""Keys before the calls that compare roles."""

_ROWS = 7
"""Positions that these calls compare."""

_SINGLE_CONTEXTS = (40, 400, 608, 1072)
"""Keys before runs of single rows: under and over 256, where llama.cpp's libraries begin to drop
masked keys, and 512 and 1,024."""

LONGEST = _SINGLE_CONTEXTS[-1] + 16
"""Positions of the longest run."""


class RowRange(NamedTuple):
    """Least and most rows of a call: a longer block is split, a shorter one padded."""

    least: int
    most: int

    def split(self, count: int) -> Iterator[slice]:
        """Slices of a block of `count` rows, one per call."""
        return (slice(at, min(at + self.most, count)) for at in range(0, count, self.most))

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


class RowClasses(NamedTuple):
    """The class of each role; see the top of this file."""

    decode: RowRange
    """Several rows of an answer."""
    prefill: RowRange
    single: bool = False
    """Whether a single row, where the library's rule allows it, is in the class of decode."""
    outputs: int = 1
    """Least rows of a call with logits, if any: the head is a product of its own."""
    together: int = 1
    """Most rows of a call that several sequences share; 1: none do."""

    @property
    def most(self) -> int:
        """Most rows of a call of either role."""
        return max(self.decode.most, self.prefill.most)

    @property
    def rollback(self) -> int:
        """Most rows of a call that are dropped: of a draft, or padding. A call keeps one at least.

        A longer draft, in several calls, may lose rows of earlier ones.
        """
        return max(self.decode.most, self.prefill.least) - 1

    def __str__(self) -> str:
        outputs = f", logits of {self.outputs} or more" * (self.outputs > 1)
        together = f", {self.together} of several sequences" * (self.together > 1)
        single = " or 1" * self.single
        return f"decode {self.decode}{single}, prefill {self.prefill}{outputs}{together}"


CANDIDATES = (
    RowClasses(RowRange(2, 16), RowRange(32, 256)),
    RowClasses(RowRange(2, 16), RowRange(64, 256)),
    RowClasses(RowRange(2, 7), RowRange(8, 256)),
    RowClasses(RowRange(2, 7), RowRange(64, 256)),
    RowClasses(RowRange(2, 16), RowRange(2, 16)),
    RowClasses(RowRange(2, 7), RowRange(2, 7)),
)
"""By ascending cost. The last two read prompts as answers: for mixtures of experts, in which an
expert gets any number of a call's rows."""

ROLLED_BACK = (
    RowClasses(RowRange(2, 16), RowRange(2, 256)),
    RowClasses(RowRange(2, 16), RowRange(8, 256)),
    RowClasses(RowRange(2, 7), RowRange(8, 256)),
    RowClasses(RowRange(2, 16), RowRange(2, 16)),
    RowClasses(RowRange(2, 7), RowRange(2, 7)),
)
"""For recurrent layers, whose states are copied once per row that may be dropped."""


class Prober(Protocol):
    """Makes the calls of a measurement, in one sequence with the same tokens at every position."""

    room: int
    """Positions that the sequence can have."""

    def prefill(self, length: int, rows: RowRange) -> None:
        """Drop all positions from `length` on; compute those up to it that are missing.

        Their calls have numbers of rows in `rows`.
        """
        ...

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        """Run `count` rows after `length` positions, in one call.

        Returns:
            Logits of the first `outputs` rows, [outputs, vocab] float32.
        """
        ...


def measure(
    prober: Prober,
    candidates: Sequence[RowClasses],
    may_be_single: Callable[[int], bool],
    seconds: float,
    *,
    clock: Callable[[], float] = perf_counter,
) -> RowClasses | None:
    """The cheapest candidate whose calls give equal bits; None: no candidate does.

    Args:
        prober: makes the calls.
        candidates: by ascending cost.
        may_be_single: whether a single row after so many keys may have the bits of others.
        seconds: time after which no longer context is tried for single rows.
        clock: seconds.
    """
    classes = next((classes for classes in candidates if _agree(prober, classes)), None)
    if classes is None:
        return None
    started, runs = clock(), 0
    for context in _SINGLE_CONTEXTS:
        if context + classes.decode.most > prober.room or (runs and clock() - started > seconds):
            break
        keys = range(context, context + classes.decode.most)
        if not all(map(may_be_single, keys)):
            continue
        prober.prefill(context, classes.prefill)
        run = [prober.rows(key, 1, 1).tobytes() for key in keys]
        if b"".join(run) != prober.rows(context, len(keys), len(keys)).tobytes():
            return classes
        runs += 1
    return classes._replace(single=runs > 0)


def keep(path: Path, classes: RowClasses) -> None:
    """Store measured classes in a file named for everything that they depend on."""
    with contextlib.suppress(OSError):  # then they are measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, classes._asdict())


def kept(path: Path) -> RowClasses | None:
    """The stored classes; None: there are none, or the file is damaged."""
    try:
        value = read_json(path)
        decode, prefill, single, *numbers = (value[name] for name in RowClasses._fields)
        roles = [RowRange(*map(int, role)) for role in (decode, prefill)]
        return RowClasses(roles[0], roles[1], bool(single), *map(int, numbers))
    except (ModelError, KeyError, TypeError, ValueError):
        return None


def _agree(prober: Prober, classes: RowClasses) -> bool:
    """True if calls of several sizes give the same bits, in both roles.

    Of a prompt's call at most as many rows get logits as of a decode call: the head is a product
    of its own, with a class of its own.
    """
    outputs = classes.decode.most
    prober.prefill(_CONTEXT, classes.prefill)
    return all(
        _equal(prober, rows, RowRange(classes.outputs, outputs))
        for rows in (classes.decode, classes.prefill)
    )


def _equal(prober: Prober, rows: RowRange, outputs: RowRange) -> bool:
    """True if calls of several sizes in `rows`, with logits of `outputs` rows, are equal."""
    sizes = {rows.least, rows.least + 1, 2 * rows.least + 1, rows.most}
    sizes = {size for size in sizes if rows.least <= size <= min(rows.most, prober.room - _CONTEXT)}
    if not sizes:
        return False
    longest = _bits(prober, max(sizes), outputs.most)
    fewest = prober.rows(_CONTEXT, rows.least, outputs.least)
    return fewest[0].tobytes() == longest[0] and all(
        _bits(prober, size, outputs.most) == longest for size in sizes
    )


def _bits(prober: Prober, size: int, most_outputs: int) -> Sequence[bytes]:
    """Bits of the `_ROWS` positions after the context, from calls of `size` rows."""
    bits: list[bytes] = []
    while len(bits) < _ROWS:
        logits = prober.rows(_CONTEXT + len(bits), size, min(size, most_outputs, _ROWS))
        bits += [row.tobytes() for row in logits]
    return bits[:_ROWS]
