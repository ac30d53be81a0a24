"""KV blocks of an engine: a pool that counts them, and a table for every sequence.

A *slot* holds the keys and values of one position, a *KV block* a fixed number of consecutive
slots. A sequence holds whole blocks. With blocks of 4 slots, and a sequence of 10 tokens:

    slots       0 1 2 3   4 5 6 7   8 9 . .               length 10, 3 blocks
    reserve(3)  0 1 2 3   4 5 6 7   8 9 . .   . . . .     slots 10, 11, 12 for a block of 3 rows
    commit(2)   length 12; slot 12 is hidden by the mask, and the next block overwrites it
    fork(9)     another sequence of length 9, with 3 blocks of its own

Blocks only count slots: the engines store keys and values by sequence, and copy them for a fork.
Independent of models and tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Generic, Self, TypeVar

from paceline.decoding.types import Block
from paceline.engines.base import KVSequence
from paceline.errors import CacheFull


class BlockPool:
    """Counts the free KV blocks of an engine."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = self.free = blocks
        self.block_size = block_size

    def take(self, count: int) -> None:
        """Allocate blocks. Raises CacheFull if fewer are free; none is then allocated."""
        if count > self.free:
            raise CacheFull(
                f"the key/value cache is full ({self.blocks * self.block_size} slots); close a "
                "sequence, shorten the prompt, or load the model with more cache_tokens"
            )
        self.free -= count


class BlockTable(ABC):
    """One sequence: its length, and the number of KV blocks for its slots.

    It shares prefilled slots only, unless it `shares_answers`: if prefill and decode use different
    kernels, the KV of a decoded answer may differ in the last bits from a prefill of the same
    tokens.
    """

    shares_answers = False

    def __init__(self, pool: BlockPool, context_length: int) -> None:
        """Create an empty sequence that can grow to `context_length` slots."""
        self._pool = pool
        self._context_length = context_length
        self.blocks = 0
        self._length = self._shareable_length = 0
        self._reserved = 0  # end of the last block's slots
        self._block = Block((), 0)  # uncommitted rows of the last block

    @property
    def length(self) -> int:
        return self._length

    @property
    def shareable_length(self) -> int:
        return self._shareable_length

    def reserve(self, rows: int) -> None:
        """Allocate KV blocks for a block of `rows` rows after `length`.

        Raises CacheFull if the pool or the context has no room; the table is unchanged.
        """
        end = self._length + rows
        if end > self._context_length:
            raise CacheFull(
                f"{end} slots do not fit into a context of {self._context_length} tokens"
            )
        missing = max(-(-end // self._pool.block_size) - self.blocks, 0)
        self._pool.take(missing)
        self.blocks += missing
        self._reserved = end

    def ran(self, block: Block) -> None:
        self._block = block

    def commit(self, rows: int) -> None:
        if not 0 <= rows <= self._reserved - self._length:
            raise ValueError(f"commit({rows}) of a block of {self._reserved - self._length} rows")
        if (self._block.prefill or self.shares_answers) and self._shareable_length == self._length:
            self._shareable_length += rows
        self._length += rows
        self._block = self._block._replace(tokens=self._block.tokens[rows:])

    def rewind(self, length: int) -> None:
        """Drop all slots starting at `length`."""
        if not 0 <= length <= self._length:
            raise ValueError(f"rewind({length}) of a sequence of {self._length} slots")
        self._length = self._reserved = length
        self._shareable_length = min(self._shareable_length, length)
        self._release(-(-length // self._pool.block_size))

    def fork_length(self, length: int) -> int:
        return min(length, self._shareable_length)

    def fork(self, length: int) -> Self:
        """Create a sequence with `fork_length(length)` slots of this one, or empty without room."""
        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self._length} slots")
        fork = self._new()
        shared = self.fork_length(length)
        try:
            fork.reserve(shared)
        except CacheFull:
            return fork
        if shared:
            fork._length = fork._shareable_length = shared
            self._copy(fork, shared)
        return fork

    @abstractmethod
    def _new(self) -> Self:
        """Return an empty sequence of the same engine."""

    @abstractmethod
    def _copy(self, fork: Self, shared: int) -> None:
        """Give `fork` the keys and values of the first `shared` slots."""

    def close(self) -> None:
        self._length = self._reserved = self._shareable_length = 0
        self._release(0)

    def _release(self, keep: int) -> None:
        """Free all KV blocks but `keep`."""
        freed, self.blocks = max(self.blocks - keep, 0), min(self.blocks, keep)
        self._pool.free += freed


Table = TypeVar("Table", bound=BlockTable)


class PooledEngine(Generic[Table]):
    """The part of `Engine` that counts slots, for sequences that are block tables of one pool."""

    shares_calls = True
    compared_keys: float = inf

    _pool: BlockPool
    _table_type: type[Table]

    @property
    def free_slots(self) -> int:
        return self._pool.free * self._pool.block_size

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def freed_by(self, sequences: Sequence[KVSequence]) -> int:
        return sum(self._table(sequence).blocks for sequence in sequences) * self.block_size

    def rest(self) -> None:
        """See `Engine.rest`."""

    def _table(self, sequence: KVSequence) -> Table:
        if not isinstance(sequence, self._table_type):
            raise TypeError(f"a {type(sequence).__name__} is not a sequence of this engine")
        return sequence

    def _reserve(self, work: Sequence[tuple[KVSequence, Block]]) -> list[Table]:
        """Return the block tables of `work`, with KV blocks reserved for all of it or for none.

        Raises CacheFull if the pool has no room for all; every table is unchanged.
        """
        tables = [self._table(sequence) for sequence, _ in work]
        done: list[Table] = []
        try:
            for table, (_, block) in zip(tables, work, strict=True):
                table.reserve(len(block.tokens))
                done.append(table)
        except CacheFull:
            for table in done:
                table.rewind(table.length)
            raise
        return tables
