"""A back-off n-gram table: the most frequent successor of the last tokens, with its probability.

Counted once from the target's own answers (`paceline learn`); tokens and probabilities are
memory-mapped, so a lookup is nearly free. It looks up the last five tokens, then fewer, down to
one. It holds the target's habits and nothing of the request; the other lookups hold the opposite.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Drafter, Proposal
from paceline.errors import ModelError
from paceline.storage.manifest import read_manifest

KIND = "paceline table"
COLUMNS = KEYS, TOKENS, PROBABILITIES = "keys.npy", "tokens.npy", "chances.npy"
PROBABILITY_UNITS = 255
"""Probabilities are stored as uint8 multiples of 1 / 255."""

MAX_ORDER = 5
"""Maximum tokens of context in a lookup."""

_MIN_PROBABILITY = 0.05
"""A draft ends before the probability that all of it is accepted falls below this."""

_WIDTH = (1 << 64) - 1
_FACTORS = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0xD6E8FEB86659FD93,
    0xA0761D6478BD642F,
    0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3,
    0x589965CC75374CC3,
)
_MIX = 0xFF51AFD7ED558CCD


class Successor(NamedTuple):
    token: int
    probability: float
    """P(token | context)."""


@dataclass(frozen=True, slots=True)
class TableFacts:
    vocab_size: int
    entries: int
    target: str


class TableColumns(NamedTuple):
    """Entries of a table, sorted by key: arrays or memory maps of one length."""

    keys: Any
    """uint32: see `keys_of`."""
    tokens: Any
    """The most frequent successor; see `token_type`."""
    probabilities: Any
    """uint8: see `PROBABILITY_UNITS`."""


class Table:
    """An open table; one serves all requests of a process.

    Entries are sorted by a 32-bit hash of (order, tokens). Two contexts with the same hash (one in
    some thousands for a full table) share an entry: a bad draft token, never a wrong token.
    """

    def __init__(self, columns: TableColumns) -> None:
        """Look up in `columns`, whose tokens are all of the target's vocabulary."""
        # A memoryview reads single numbers faster than numpy.
        self._keys, self._tokens = memoryview(columns.keys), memoryview(columns.tokens)
        self._probabilities = memoryview(columns.probabilities)

    @classmethod
    def open(cls, folder: Path, vocab_size: int) -> "Table":
        """Open the table in `folder` for a target.

        Raises ModelError if it is not a table, or is one for a vocabulary of another size.
        """
        facts = read_manifest(folder, KIND, TableFacts)
        if facts.vocab_size != vocab_size:
            raise ModelError(
                f"{folder} is a table for {facts.target} with {facts.vocab_size} tokens; "
                f"this target has {vocab_size}"
            )
        columns = TableColumns(
            _joined(_column(folder / KEYS, np.uint16, (2, facts.entries))),
            _column(folder / TOKENS, token_type(vocab_size), (facts.entries,)),
            _column(folder / PROBABILITIES, np.uint8, (facts.entries,)),
        )
        last = int(columns.tokens.max(initial=0))
        if last >= vocab_size:
            raise ModelError(f"{folder / TOKENS} has token {last}; this target has {vocab_size}")
        return cls(columns)

    def after(self, context: Sequence[int]) -> Successor | None:
        """Return the successor of the longest suffix of `context` in the table, or None."""
        for key in reversed(keys_of(context)):
            at = bisect_left(self._keys, key)
            if at < len(self._keys) and self._keys[at] == key:
                return Successor(self._tokens[at], self._probabilities[at] / PROBABILITY_UNITS)
        return None


class TableDrafter(Drafter):
    """Proposes the table's successors, token by token, while they are likely."""

    def __init__(self, table: Table, name: str = "table") -> None:
        """Draft from an open table; `name` is also the source of its proposals."""
        self._table, self.name = table, name

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        suffix = list(context[-MAX_ORDER:])
        tokens: list[int] = []
        probabilities: list[float] = []
        all_accepted = 1.0
        while len(tokens) < limit:
            successor = self._table.after(suffix)
            if successor is None:
                break
            all_accepted *= successor.probability
            if all_accepted < _MIN_PROBABILITY:
                break
            tokens.append(successor.token)
            probabilities.append(successor.probability)
            suffix = [*suffix[1 - MAX_ORDER :], successor.token]
        return Proposal(tokens, self.name, 0, probabilities)


def keys_of(context: Sequence[int], max_order: int = MAX_ORDER) -> list[int]:
    """Return keys of the last token, of the last two, and so on up to `max_order` (<= 8)."""
    keys = []
    mixed = 0
    for order, token in enumerate(islice(reversed(context), max_order)):
        mixed = (mixed + (token + 1) * _FACTORS[order]) & _WIDTH
        keys.append((((mixed ^ order) * _MIX) & _WIDTH) >> 32)
    return keys


def keys_at(tokens: npt.NDArray[np.int64], order: int) -> npt.NDArray[np.uint32]:
    """Return keys of a whole text at once: of the `order` + 1 tokens that end at a position.

    [n] tokens -> [n - order] keys, for positions `order` to n - 1; equal to those of `keys_of`.
    """
    count = len(tokens) - order
    mixed = np.zeros(max(count, 0), np.uint64)
    for back in range(order + 1):
        start = order - back
        mixed += (tokens[start : start + len(mixed)] + 1).astype(np.uint64) * np.uint64(
            _FACTORS[back]
        )
    mixed ^= np.uint64(order)
    mixed *= np.uint64(_MIX)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def halves(keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Split sorted keys for storage, [n] -> [2, n]: their upper 16 bits, then the lower.

    Wheel compression then shrinks the upper ones to a fifteenth, so the keys to half:

        keys    0003_91ac  0003_f00d  0004_0a51
        halves  0003 0003 0004   91ac f00d 0a51
    """
    return np.stack([keys >> 16, keys & 0xFFFF]).astype(np.uint16)


def _joined(parts: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """Return the keys of their `halves`."""
    keys: npt.NDArray[np.uint32] = parts[0].astype(np.uint32)
    keys <<= 16
    keys |= parts[1]
    return keys


def token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the smallest dtype that holds a token of this vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def entry_bytes(vocab_size: int) -> int:
    return 4 + np.dtype(token_type(vocab_size)).itemsize + 1


def _column(path: Path, kind: type[np.generic], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as a column of numbers: {error}") from error
    if array.dtype != kind or array.shape != shape:
        raise ModelError(
            f"{path} holds {array.dtype} {list(array.shape)}; expected {np.dtype(kind)} "
            f"{list(shape)}: make the table again with `paceline learn`"
        )
    return array
