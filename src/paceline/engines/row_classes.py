"""Row classes: numbers of rows in a call for which a row of logits has the same bits.

Runtimes choose kernels by the rows of a call, and kernels add in different orders. Two calls whose
numbers of rows are in one class give a position the same bits. So each *role* keeps to one class:

    prompt of 100 tokens, prefill 64-512     one call of 100 rows
    prompt of 40 tokens, prefill 64-512      one call of 64 rows: 40, and 24 of padding
    answer, decode 1-16                      1 row, or 1 + a draft of up to 15, as it comes
    a draft of 20                            calls of 16 and 5 rows

One row alone is the cheapest call of plain decoding, and the most likely to be a class of its own:
with one row there is less to divide among threads, so keys are divided, and sums change. Whether
they are depends on the number of keys. So single rows are measured by *window* of 32 keys:

    keys before the row     0-31  32-63  ...  256-287  288-319  ...  from 1,024 on
    one row equals two       yes   yes           no      yes              yes
    rows of a plain call      1     1             2       1                1

`measure` measures candidates in the order of their cost. Independent of runtimes: calls are made by
a `Prober`. A measurement proves nothing for what it did not run: other threads, another processor,
and windows from `WINDOWS` on, for which it takes the result of the last eight.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol

from paceline.decoding.types import Logits
from paceline.errors import ModelError
from paceline.storage.files import read_json, write_json

WINDOW = 32
"""Keys of a window."""

WINDOWS = 32
"""Windows that are measured, 1,024 keys: llama.cpp's libraries pad the keys of a call to 256, and
drop masked ones where that saves a quarter, which ends at 768."""

_LAST = 8
"""Windows that decide about those after them: 256 keys."""

_CONTEXT = 40
"""Keys before the calls that compare roles."""

_ROWS = 7
"""Positions that these calls compare."""


class RowRange(NamedTuple):
    """Least and most rows of a call: a longer block is split, a shorter one padded."""

    least: int
    most: int

    def split(self, count: int) -> Iterator[slice]:
        """Slices of a block of `count` rows, one for each call."""
        return (slice(at, min(at + self.most, count)) for at in range(0, count, self.most))

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


class RowClasses(NamedTuple):
    """The class of each role; see the top of this file."""

    decode: RowRange
    """Several rows of an answer."""
    prefill: RowRange
    single: str = ""
    """A character for each measured window: `1` where a single row is in the class of decode."""

    @property
    def most(self) -> int:
        """Most rows of a call of either role."""
        return max(self.decode.most, self.prefill.most)

    def least(self, keys: int) -> int:
        """Fewest rows of a decode call after `keys` keys."""
        window = keys // WINDOW
        if window < len(self.single):
            return 1 if self.single[window] == "1" else self.decode.least
        whole = len(self.single) == WINDOWS and self.single.endswith("1" * _LAST)
        return 1 if whole else self.decode.least

    def __str__(self) -> str:
        return f"decode {self.decode}, prefill {self.prefill}, single {self.single or 'none'}"


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


class Prober(Protocol):
    """Makes the calls of a measurement, in one sequence with the same tokens at each position."""

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
    seconds: float,
    *,
    most_rows: int | None = None,
    clock: Callable[[], float] = perf_counter,
) -> RowClasses | None:
    """The cheapest candidate whose calls give equal bits; None: no candidate does.

    Candidates with calls of over `most_rows` rows, which may be wrong, are left out.

    Windows of single rows are measured for `seconds`; the others have the least rows of decode.
    """
    allowed = [classes for classes in CANDIDATES if most_rows is None or classes.most <= most_rows]
    classes = next((classes for classes in allowed if _agree(prober, classes)), None)
    if classes is None:
        return None
    single, started = "", clock()
    while len(single) < WINDOWS and clock() - started < seconds:
        # The middle of the window: a row at its end would be in the next one with padding.
        keys = len(single) * WINDOW + WINDOW // 2
        if keys + classes.prefill.least > prober.room:
            break
        prober.prefill(keys, classes.prefill)
        alone = prober.rows(keys, 1, 1).tobytes()
        single += str(int(alone == prober.rows(keys, 2, 1).tobytes()))
    return classes._replace(single=single)


def keep(path: Path, classes: RowClasses) -> None:
    """Store measured classes in a file named for everything that they depend on."""
    with contextlib.suppress(OSError):  # then they are measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, classes._asdict())


def kept(path: Path) -> RowClasses | None:
    """The stored classes; None: there are none, or the file is damaged."""
    try:
        value = read_json(path)
        decode, prefill, single = (value[name] for name in RowClasses._fields)
        return RowClasses(RowRange(*map(int, decode)), RowRange(*map(int, prefill)), str(single))
    except (ModelError, KeyError, TypeError, ValueError):
        return None


def _agree(prober: Prober, classes: RowClasses) -> bool:
    """True if calls of several sizes give the same bits, in each role.

    Of a prompt's call at most as many rows get logits as of a decode call: the head is a product
    of its own, with a class of its own.
    """
    outputs = classes.decode.most
    prober.prefill(_CONTEXT, classes.prefill)
    return _equal(prober, classes.decode, outputs) and _equal(prober, classes.prefill, outputs)


def _equal(prober: Prober, rows: RowRange, most_outputs: int) -> bool:
    """True if calls of several sizes in `rows` give the same bits."""
    sizes = {rows.least, rows.least + 1, 2 * rows.least + 1, rows.most}
    sizes = {size for size in sizes if rows.least <= size <= min(rows.most, prober.room - _CONTEXT)}
    if not sizes:
        return False
    longest = _bits(prober, max(sizes), most_outputs)
    return prober.rows(_CONTEXT, rows.least, 1).tobytes() == longest[0] and all(
        _bits(prober, size, most_outputs) == longest for size in sizes
    )


def _bits(prober: Prober, size: int, most_outputs: int) -> Sequence[bytes]:
    """Bits of the `_ROWS` positions after the context, from calls of `size` rows."""
    bits: list[bytes] = []
    while len(bits) < _ROWS:
        logits = prober.rows(_CONTEXT + len(bits), size, min(size, most_outputs, _ROWS))
        bits += [row.tobytes() for row in logits]
    return bits[:_ROWS]
