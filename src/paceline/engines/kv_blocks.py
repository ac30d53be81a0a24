"""KV blocks of an engine: a pool with a free list, and a block table for every sequence.

A *slot* holds the keys and values of one position, a *KV block* a fixed number of consecutive
slots. Sequences that share a prefix share its full blocks. With blocks of 4 slots, a sequence of 10
tokens, and a fork of its first 9:

    slots       0 1 2 3   4 5 6 7   8 9 . .
    sequence    block 5   block 2   block 7     length 10
    fork(9)     block 5   block 2               length 8: only full blocks are shared

    reserve(3)  block 5   block 2   block 7   block 0      slots 10, 11, 12 for a block of 3 rows
    commit(2)   length 12; slot 12 is hidden by the mask, and the next block overwrites it

Blocks 5 and 2 now have two holders, which makes them read-only: the fork writes its next tokens to
a block of its own, and `rewind(6)` of the sequence goes back to 4. Independent of models and
tensors.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from typing import Generic, Self, TypeVar

from paceline.decoding.types import Block
from paceline.engines.base import KVSequence
from paceline.errors import CacheFull


class BlockPool:
    """Allocates KV blocks and counts their holders, which are sequences."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.spare = blocks
        """One more block, outside the pool: for padding rows, whose results are not read."""
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Allocate a block and return its number. Raises CacheFull if no block is free."""
        if not self._free:
            raise CacheFull(
                f"the key/value cache is full ({self.blocks * self.block_size} slots); close a "
                "sequence, shorten the prompt, or load the model with more cache_tokens"
            )
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> int:
        """Add a holder to an allocated block."""
        self._holders[block] += 1
        return block

    def shared(self, block: int) -> bool:
        """Return whether several sequences hold the block, which makes it read-only."""
        return self._holders[block] > 1

    def freed_by(self, tables: Iterable["BlockTable"]) -> int:
        held = Counter(number for table in tables for number in table._numbers)
        free = sum(count == self._holders[number] for number, count in held.items())
        return free * self.block_size

    def give_back(self, block: int) -> None:
        """Remove a holder; the last one frees the block."""
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)


class BlockTable:
    """One sequence: its length, and the KV blocks that hold its slots, in order."""

    def __init__(self, pool: BlockPool, context_length: int) -> None:
        """Create an empty sequence that can grow to `context_length` slots."""
        self._pool = pool
        self._context_length = context_length
        self._numbers: list[int] = []
        self._length = 0
        self._reserved = 0  # end of the last block's slots

    @property
    def length(self) -> int:
        return self._length

    @property
    def shareable_length(self) -> int:
        return self._length

    def reserve(self, rows: int) -> None:
        """Allocate KV blocks for a block of `rows` rows after `length`.

        Raises CacheFull if the pool or the context has no room; the table is unchanged.
        """
        end = self._length + rows
        if end > self._context_length:
            raise CacheFull(
                f"{end} slots do not fit into a context of {self._context_length} tokens"
            )
        held = len(self._numbers)
        try:
            while len(self._numbers) * self._pool.block_size < end:
                self._numbers.append(self._pool.take())
        except CacheFull:
            self._release(held)
            raise
        self._reserved = end

    def blocks(self, rows: int, at: int | None = None) -> list[int]:
        """Return KV block numbers for slots [0, at + rows); the spare one where none is allocated.

        `at` is `length` if it is None.
        """
        needed = -(-((self._length if at is None else at) + rows) // self._pool.block_size)
        held = self._numbers[:needed]
        return held + [self._pool.spare] * (needed - len(held))

    def commit(self, rows: int) -> None:
        if not 0 <= rows <= self._reserved - self._length:
            raise ValueError(f"commit({rows}) of a block of {self._reserved - self._length} rows")
        self._length += rows

    def rewind(self, length: int) -> None:
        """Drop all slots starting at `length`.

        If the KV block at `length` is shared, its slots are dropped too: the next block writes it.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"rewind({length}) of a sequence of {self._length} slots")
        full, rest = divmod(length, self._pool.block_size)
        if rest and self._pool.shared(self._numbers[full]):
            length -= rest
        self._length = self._reserved = length
        self._release(-(-length // self._pool.block_size))

    def fork_length(self, length: int) -> int:
        return min(length, self._length) // self._pool.block_size * self._pool.block_size

    def fork(self, length: int) -> Self:
        """Create a sequence that shares the full KV blocks among the first `length` slots."""
        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self._length} slots")
        full = min(length, self._length) // self._pool.block_size
        other = type(self)(self._pool, self._context_length)
        other._numbers = [self._pool.share(block) for block in self._numbers[:full]]
        other._length = other._reserved = full * self._pool.block_size
        return other

    def close(self) -> None:
        self._length = self._reserved = 0
        self._release(0)

    def _release(self, keep: int) -> None:
        """Free all KV blocks but the first `keep`."""
        while len(self._numbers) > keep:
            self._pool.give_back(self._numbers.pop())


class PrefillTable(BlockTable):
    """A block table that shares prefilled slots only, unless it `shares_answers`.

    For engines whose prefill and decode use different kernels: the KV of a decoded answer may then
    differ in the last bits from a prefill of the same tokens.
    """

    shares_answers = False

    def __init__(self, pool: BlockPool, context_length: int) -> None:
        super().__init__(pool, context_length)
        self._shareable_length = 0
        self._prefill = False

    @property
    def shareable_length(self) -> int:
        return self._shareable_length

    def ran(self, block: Block) -> None:
        self._prefill = block.prefill

    def commit(self, rows: int) -> None:
        before = self.length
        super().commit(rows)
        if (self._prefill or self.shares_answers) and self._shareable_length == before:
            self._shareable_length = self.length

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._shareable_length = min(self._shareable_length, self.length)

    def fork_length(self, length: int) -> int:
        return super().fork_length(min(length, self._shareable_length))

    def fork(self, length: int) -> Self:
        """Create a sequence that shares full KV blocks of the prefilled prefix, up to `length`."""
        other = super().fork(min(length, self._shareable_length))
        other._shareable_length = other.length
        return other

    def close(self) -> None:
        super().close()
        self._shareable_length = 0


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
        return self._pool.freed_by(map(self._table, sequences))

    def rest(self) -> None:
        """See `Engine.rest`."""

    def _table(self, sequence: KVSequence) -> Table:
        if not isinstance(sequence, self._table_type):
            raise TypeError(f"a {type(sequence).__name__} is not a sequence of this engine")
        return sequence

    def _reserve(self, work: Sequence[tuple[KVSequence, Block]]) -> list[Table]:
        """Return the block tables of `work`, with reserved KV blocks. Raises CacheFull."""
        tables = [self._table(sequence) for sequence, _ in work]
        reserve_all(
            [(table, len(block.tokens)) for table, (_, block) in zip(tables, work, strict=True)]
        )
        return tables


def reserve_all(call: Sequence[tuple[BlockTable, int]]) -> None:
    """Reserve rows for all tables of `call`, (table, number of rows) pairs, or for none.

    Raises CacheFull if the pool has no room for all; every table is unchanged.
    """
    done: list[BlockTable] = []
    try:
        for table, rows in call:
            table.reserve(rows)
            done.append(table)
    except CacheFull:
        for table in done:
            table.rewind(table.length)
        raise
