"""Rows that the calls of an engine may have, so that a row's bits do not depend on its call.

Runtimes choose kernels by the rows and the keys of a call, and kernels add in different orders. Two
calls whose numbers of rows are in one *class* give a position the same bits. So a role keeps to one
class:

    prompt of 100 tokens, prefill 64-512     one call of 100 rows
    prompt of 40 tokens, prefill 64-512      one call of 64 rows: 40, and 24 of padding
    answer, decode 2-16                      1 row and one of padding, or 1 + a draft of up to 15
    a draft of 20                            calls of 16 and 5 rows

One row alone is the cheapest call, and the most likely to be a class of its own: there is less to
divide among threads, so a kernel may divide keys, by their number.

Where a runtime's source says which rows are in a class, an engine states its rules and verifies
them (`rows_hold` in `exact.py`). Where that depends on the chip, it measures them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError
from paceline.storage.files import read_json, write_json


class RowRange(NamedTuple):
    """Least and most rows of a call: a longer block is split, a shorter one padded."""

    least: int
    most: int

    def split(self, count: int, position: int = 0, cuts: Sequence[int] = ()) -> Iterator[slice]:
        """Yield the slices of a block of `count` rows that starts at `position`, one per call.

        `cuts` are numbers of keys at which a kernel may change. A call before a cut has fewer keys,
        even if it is padded, and a call after it has at least as many:

            rows of a call       2 to 8        cut at 1024 keys: no call crosses position 1022
            block at 1018        [1018 .. 1021] [1022 .. 1025]
            keys of the calls     1,022          1,026
        """
        at = 0
        while at < count:
            cut = next((keys for keys in cuts if keys - self.least > position + at), None)
            end = count if cut is None else min(count, cut - self.least - position)
            end = min(end, at + self.most)
            yield slice(at, end)
            at = end

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


class RowRules(NamedTuple):
    """Rows that an engine's calls may have; see the top of this file."""

    decode: RowRange
    """Rows of one sequence's answer."""
    prefill: RowRange
    single: bool = False
    """Whether a single row, where the library's rule allows it, is in the class of decode."""
    together: int = 1
    """Most rows of a call that several sequences share; 1: none do."""
    cuts: Sequence[int] = ()
    """Keys at which kernels change, ascending: no call of an answer crosses them."""

    @property
    def one_class(self) -> bool:
        """Whether an answer's rows have the bits of a prompt's, which a later prompt may share."""
        return self.prefill.least == self.decode.least > 1

    @property
    def outputs(self) -> int:
        """Least rows of a call with logits, if any: after attention they run without the others."""
        return 1 if self.single else self.decode.least

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


def save_rules(path: Path | None, rules: RowRules) -> None:
    """Store verified rules, if there is a path for them."""
    if path is None:
        return
    with contextlib.suppress(OSError):  # then they are verified again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, rules._asdict())


def load_rules(path: Path | None) -> RowRules | None:
    """Return the stored rules, or None if there are none or the file is damaged."""
    if path is None:
        return None
    try:
        value = read_json(path)
        decode, prefill, single, together, _ = (value[name] for name in RowRules._fields)
        ranges = [RowRange(*map(int, role)) for role in (decode, prefill)]
        return RowRules(ranges[0], ranges[1], bool(single), int(together))
    except (ModelError, KeyError, TypeError, ValueError):
        return None
