"""A table of what the target usually says: after these tokens, that one.

Counted once from the target's own answers (`paceline train table`) and memory-mapped, so asking it
costs nothing. It looks up the last five tokens, then fewer, down to one, and answers with the most
frequent successor and how often it was that one. It knows the target's manner, not the request:
that is what it has over the matchers, and the other way round.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Drafter, Proposal
from paceline.errors import ModelError
from paceline.storage.manifest import read_manifest

KIND = "paceline table"
KEYS, TOKENS, PROBABILITIES = "keys.npy", "tokens.npy", "chances.npy"
PROBABILITY_UNITS = 255
"""Chances are kept as whole numbers of this many parts."""

MAX_ORDER = 5
"""Tokens of context that are looked up at most."""

_HOPELESS = 0.05
"""A draft ends where it stands whole less often than this."""

_WIDTH = (1 << 64) - 1
_FACTORS = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0xD6E8FEB86659FD93,
    0xA0761D6478BD642F,
)
_MIX = 0xFF51AFD7ED558CCD


class Successor(NamedTuple):
    """What follows a context."""

    token: int
    probability: float
    """How likely it is to be this one."""


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Facts in a table's manifest."""

    vocab_size: int
    entries: int
    target: str


class Table:
    """An open table; one serves all requests of a process.

    Entries are sorted by a 32-bit hash of (order, tokens). Two contexts that share a hash (one in
    some thousands for a full table) get one answer: a guess that is wrong, never a wrong token.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Open the table in `folder` for a target.

        Raises:
            ModelError: it is no table, or not one for a vocabulary of `vocab_size` tokens.
        """
        facts = read_manifest(folder, KIND, TableFacts)
        if facts.vocab_size != vocab_size:
            raise ModelError(
                f"{folder} is a table for {facts.target} with {facts.vocab_size} tokens; "
                f"this target has {vocab_size}"
            )
        entries = facts.entries
        self._keys = _column(folder / KEYS, np.uint32, entries)
        self._tokens = _column(folder / TOKENS, token_type(vocab_size), entries)
        self._probabilities = _column(folder / PROBABILITIES, np.uint8, entries)
        last = int(np.frombuffer(self._tokens, token_type(vocab_size)).max(initial=0))
        if last >= vocab_size:
            raise ModelError(f"{folder / TOKENS} has token {last}; this target has {vocab_size}")

    def after(self, context: Sequence[int]) -> Successor | None:
        """What follows the longest ending of `context` that is in the table."""
        for key in reversed(keys_of(context)):
            at = bisect_left(self._keys, key)
            if at < len(self._keys) and self._keys[at] == key:
                return Successor(self._tokens[at], self._probabilities[at] / PROBABILITY_UNITS)
        return None


class TableDrafter(Drafter):
    """Proposes what the table says, token after token, as long as there is hope."""

    name = "table"

    def __init__(self, table: Table) -> None:
        """Draft from an open table."""
        self._table = table

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The most usual way on, each token with its probability."""
        ending = list(context[-MAX_ORDER:])
        tokens: list[int] = []
        probabilities: list[float] = []
        stands = 1.0
        while len(tokens) < limit:
            found = self._table.after(ending)
            if found is None:
                break
            stands *= found.probability
            if stands < _HOPELESS:
                break
            tokens.append(found.token)
            probabilities.append(found.probability)
            ending = [*ending[1 - MAX_ORDER :], found.token]
        return Proposal(tokens, self.name, 0, probabilities)


def keys_of(context: Sequence[int]) -> list[int]:
    """The keys of the last token of `context`, the last two, and so on; the shortest first."""
    keys = []
    mixed = 0
    for order, token in enumerate(islice(reversed(context), MAX_ORDER)):
        mixed = (mixed + (token + 1) * _FACTORS[order]) & _WIDTH
        keys.append(_finish(mixed, order))
    return keys


def keys_at(tokens: npt.NDArray[np.int64], order: int) -> npt.NDArray[np.uint32]:
    """For a whole text at once: the key of the `order` + 1 tokens that end at each place.

    [n] tokens -> [n - order] keys, of the endings at places `order` to n - 1; as in `keys_of`.
    """
    count = len(tokens) - order
    mixed = np.zeros(max(count, 0), np.uint64)
    for back in range(order + 1):
        place = order - back
        mixed += (tokens[place : place + len(mixed)] + 1).astype(np.uint64) * np.uint64(
            _FACTORS[back]
        )
    mixed ^= np.uint64(order)
    mixed *= np.uint64(_MIX)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type that holds a token of this vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def entry_bytes(vocab_size: int) -> int:
    """What an entry takes on disk: key, token and probability."""
    return 4 + np.dtype(token_type(vocab_size)).itemsize + 1


def _finish(mixed: int, order: int) -> int:
    return (((mixed ^ order) * _MIX) & _WIDTH) >> 32


def _column(path: Path, kind: type[np.generic], entries: int) -> memoryview:
    """A column as a memory map: its numbers are read without numpy's price for a single one."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as a column of numbers: {error}") from error
    if array.dtype != kind or array.shape != (entries,):
        raise ModelError(
            f"{path} holds {array.dtype} {list(array.shape)}; expected {np.dtype(kind)} [{entries}]"
        )
    return memoryview(array)
