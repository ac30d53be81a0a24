"""A sequence's slots, and which of them were read as a prompt."""

from typing import Self

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import BlockPool, BlockTable


class OpenVinoSequence(BlockTable):
    """See `KVSequence` in `engines/base.py`.

    An answer's rows get another attention kernel than a prompt's, so its keys and values differ in
    the last bits from those that reading it again gives: nobody else may go on from them.
    """

    def __init__(self, pool: BlockPool, context_length: int) -> None:
        """An empty sequence that can grow to `context_length` slots."""
        super().__init__(pool, context_length)
        self._shareable_length = 0
        self._reading = False

    @property
    def shareable_length(self) -> int:
        """Slots, from the first on, that were read as a prompt."""
        return self._shareable_length

    def run(self, block: Block) -> None:
        """Note what is run behind the slots that there are."""
        self._reading = block.prefill

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block."""
        before = self.length
        super().commit(rows)
        if self._reading and self._shareable_length == before:
            self._shareable_length = self.length

    def rewind(self, length: int) -> None:
        """Forget all slots from `length` on; see `BlockTable`."""
        super().rewind(length)
        self._shareable_length = min(self._shareable_length, self.length)

    def fork(self, length: int) -> Self:
        """A new sequence that shares full blocks of a prompt's slots, up to `length`."""
        other = super().fork(min(length, self._shareable_length))
        other._shareable_length = other.length
        return other

    def close(self) -> None:
        """Give all blocks back."""
        super().close()
        self._shareable_length = 0
