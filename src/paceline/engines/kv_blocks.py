"""Which cache blocks belong to which sequence: a pool with a free list, tables of block numbers.

Knows nothing of models or tensors. A *cache block* is a fixed number of consecutive slots; several
sequences may hold the same one when it is full and they share a prefix.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

from paceline.errors import CacheFull


class BlockPool:
    """Hands out cache blocks, and counts who holds them."""

    def __init__(self, blocks: int, block_size: int) -> None:
        """A pool of `blocks` blocks of `block_size` slots each."""
        self.block_size = block_size
        self.blocks = blocks
        self.spare = blocks
        """One more block, which belongs to nobody: for rows that nobody will read."""
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free block.

        Raises:
            CacheFull: there is none.
        """
        if not self._free:
            raise CacheFull(
                f"the key/value cache is full ({self.blocks * self.block_size} slots); close a "
                "sequence, shorten the prompt, or load the model with more cache_tokens"
            )
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more holder for a block that is held."""
        self._holders[block] += 1
        return block

    def shared(self, block: int) -> bool:
        """Whether several sequences hold the block, so that nobody may write to it."""
        return self._holders[block] > 1

    def freed_by(self, tables: Iterable["BlockTable"]) -> int:
        """Slots that closing `tables` would free: see `Engine.freed_by`."""
        held = Counter(number for table in tables for number in table._numbers)
        free = sum(count == self._holders[number] for number, count in held.items())
        return free * self.block_size

    def give_back(self, block: int) -> None:
        """One holder less; free when it was the last."""
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)


class BlockTable:
    """One sequence's slots: a length, and the cache blocks that hold them in order."""

    def __init__(self, pool: BlockPool, context_length: int) -> None:
        """An empty sequence that can grow to `context_length` slots."""
        self._pool = pool
        self._context_length = context_length
        self._numbers: list[int] = []
        self._length = 0
        self._reach = 0  # slots the last block went up to

    @property
    def length(self) -> int:
        """Slots that belong to the sequence."""
        return self._length

    @property
    def shareable_length(self) -> int:
        """Slots, from the first on, that a prompt with the same tokens would have."""
        return self._length

    @property
    def unused(self) -> int:
        """Slots after `length` in the cache blocks that it holds."""
        return len(self._numbers) * self._pool.block_size - self._length

    def reserve(self, rows: int) -> None:
        """Make room for a block of `rows` rows after `length`.

        Raises:
            CacheFull: the pool or the context has no room; the table is as it was.

        """
        reach = self._length + rows
        if reach > self._context_length:
            raise CacheFull(
                f"{reach} slots do not fit into a context of {self._context_length} tokens"
            )
        held = len(self._numbers)
        try:
            while len(self._numbers) * self._pool.block_size < reach:
                self._numbers.append(self._pool.take())
        except CacheFull:
            self._release(held)
            raise
        self._reach = reach

    def blocks(self, rows: int) -> list[int]:
        """The cache blocks that hold slots [0, length + rows), the spare one where none is held."""
        needed = -(-(self._length + rows) // self._pool.block_size)
        held = self._numbers[:needed]
        return held + [self._pool.spare] * (needed - len(held))

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block."""
        if not 0 <= rows <= self._reach - self._length:
            raise ValueError(f"commit({rows}) of a block of {self._reach - self._length} rows")
        self._length += rows

    def rewind(self, length: int) -> None:
        """Forget all slots from `length` on.

        A few before it go too when others hold their cache block: it would be written to next.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"rewind({length}) of a sequence of {self._length} slots")
        full, rest = divmod(length, self._pool.block_size)
        if rest and self._pool.shared(self._numbers[full]):
            length -= rest
        self._length = self._reach = length
        self._release(-(-length // self._pool.block_size))

    def fork(self, length: int) -> Self:
        """A new sequence that shares the full blocks among this one's first `length` slots."""
        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self._length} slots")
        full = min(length, self._length) // self._pool.block_size
        other = type(self)(self._pool, self._context_length)
        other._numbers = [self._pool.share(block) for block in self._numbers[:full]]
        other._length = other._reach = full * self._pool.block_size
        return other

    def close(self) -> None:
        """Give all blocks back."""
        self._length = self._reach = 0
        self._release(0)

    def _release(self, keep: int) -> None:
        """Give back all blocks but the first `keep`."""
        while len(self._numbers) > keep:
            self._pool.give_back(self._numbers.pop())


def reserve_all(call: Sequence[tuple[BlockTable, int]]) -> None:
    """Make room for every block of a call, given the rows of each.

    Raises:
        CacheFull: there is no room for all; none has got any.

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
