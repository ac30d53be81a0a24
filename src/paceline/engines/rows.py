"""Row counts that keep a row's bits independent of its forward pass.

Runtimes choose kernels by the rows and the keys of a forward pass, and kernels add in different
orders. Two passes whose row counts are in one *class* give a position the same bits. So each role
uses one class:

    prompt of 100 tokens, prefill 64-512     one pass of 100 rows
    prompt of 40 tokens, prefill 64-512      one pass of 64 rows: 40, and 24 of padding
    answer, decode 2-16                      1 row and one of padding, or 1 + a draft of up to 15
    a draft of 20                            passes of 16 and 5 rows

One row alone is the cheapest pass, and the most likely to be a class of its own: there is less work
to divide among threads, so a kernel may divide the keys, depending on their number.

Where a runtime's source says which rows are in a class, an engine states its rules and verifies
them (`rows_hold` in `exact.py`). Where that depends on the chip, it measures them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from paceline.errors import ModelError
from paceline.storage.files import read_json, store_json

_T = TypeVar("_T")


class RowRange(NamedTuple):
    """Minimum and maximum rows of a pass: a longer block is split, a shorter one padded."""

    min_rows: int
    max_rows: int

    def split(self, count: int, position: int = 0, cuts: Sequence[int] = ()) -> Iterator[slice]:
        """Yield the slices of a block of `count` rows that starts at `position`, one per pass.

        `cuts` are numbers of keys where a kernel may change. A pass before a cut has fewer keys,
        even if it is padded, and a pass after it has at least that many:

            rows of a pass       2 to 8        cut at 1024 keys: no pass crosses position 1022
            block at 1018        [1018 .. 1021] [1022 .. 1025]
            keys of the passes    1,022          1,026
        """
        at = 0
        while at < count:
            cut = next((keys for keys in cuts if keys - self.min_rows > position + at), None)
            end = count if cut is None else min(count, cut - self.min_rows - position)
            end = min(end, at + self.max_rows)
            yield slice(at, end)
            at = end

    def __str__(self) -> str:
        return f"{self.min_rows}-{self.max_rows}"


class RowRules(NamedTuple):
    """Row counts that an engine's passes may have; see the top of this file."""

    decode: RowRange
    """Rows of one sequence's answer."""
    prefill: RowRange
    single: bool = False
    """True if a single row, where the library's rule allows it, is in the class of decode."""
    together: int = 1
    """Maximum rows of a pass that several sequences share; 1: none do."""
    cuts: Sequence[int] = ()
    """Keys where kernels change, ascending: no pass of an answer crosses them."""

    @property
    def one_class(self) -> bool:
        """True if an answer's rows have the bits of a prompt's; later prompts may share them."""
        return self.prefill.min_rows == self.decode.min_rows > 1

    @property
    def outputs(self) -> int:
        """Minimum rows of a pass with logits, if any: after attention only these rows run."""
        return 1 if self.single else self.decode.min_rows

    @property
    def rollback(self) -> int:
        """Maximum rows per pass that are dropped: a draft's, or padding. A pass keeps at least one.

        A longer draft, in several passes, may lose rows of earlier ones.
        """
        return max(self.decode.max_rows, self.prefill.min_rows) - 1

    def __str__(self) -> str:
        outputs = f", logits of {self.outputs} or more" * (self.outputs > 1)
        together = f", {self.together} of several sequences" * (self.together > 1)
        single = " or 1" * self.single
        return f"decode {self.decode}{single}, prefill {self.prefill}{outputs}{together}"


def grouped(items: Iterable[_T], fits: Callable[[Sequence[_T]], bool]) -> Iterator[list[_T]]:
    """Yield groups of consecutive items, each as long as it `fits`, or of one item."""
    group: list[_T] = []
    for item in items:
        if group and not fits([*group, item]):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def save_rules(path: Path | None, rules: RowRules) -> None:
    if path is not None:
        store_json(path, rules._asdict())


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
