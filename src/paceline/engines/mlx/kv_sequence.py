"""One sequence of the engine: its slots on paper, its tokens, and what the model holds of it.

Slots are counted in blocks, as everywhere; the arrays are MLX's and grow by themselves. Two
sequences share no slots for long: what a fork shares is copied by whoever writes first.
"""

from collections.abc import Sequence
from typing import Self

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import BlockPool, BlockTable
from paceline.engines.mlx.model import LoadedModel
from paceline.engines.mlx.states import States
from paceline.errors import CacheFull


class MlxSequence(BlockTable):
    """See `KVSequence` in `engines/base.py`.

    A prompt is read in calls of many rows, whose kernels may differ from those of an answer's. So
    keys and values of an answer may differ in their last bits from those that reading it as a
    prompt gives, and only a prompt's are shared.
    """

    def __init__(self, pool: BlockPool, context_length: int, model: LoadedModel) -> None:
        """An empty sequence of a model."""
        super().__init__(pool, context_length)
        self._model = model
        self._states: States | None = None
        self.tokens: list[int] = []
        """The tokens in its slots: where a recurrence cannot go back, they are run again."""
        self._block: Sequence[int] = ()
        self._reading = False
        self._shareable_length = 0

    @property
    def shareable_length(self) -> int:
        """Slots, from the first on, that were read as a prompt."""
        return self._shareable_length

    @property
    def states(self) -> States:
        """What the model holds of it; it may be more or less than `length` slots."""
        if self._states is None:
            self._states = self._model.empty()
        return self._states

    def ran(self, block: Block) -> None:
        """Note the block that was run last."""
        self._block = block.tokens
        self._reading = block.prefill

    def forget(self) -> None:
        """Hold nothing: what a call that failed has left behind is unknown."""
        self._states = None
        self.rewind(self.length)  # what was run cannot be committed

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block."""
        before = self.length
        super().commit(rows)
        if self._reading and self._shareable_length == before:
            self._shareable_length = self.length
        self.tokens += self._block[:rows]
        self._block = self._block[rows:]

    def rewind(self, length: int) -> None:
        """Forget all slots from `length` on."""
        super().rewind(length)
        self._shareable_length = min(self._shareable_length, self.length)
        del self.tokens[length:]
        self._block = ()

    def fork(self, length: int) -> Self:
        """A sequence with this one's first slots, none of them an answer's.

        Of a recurrence those up to a place where its state was kept.
        """
        import mlx.core as mx

        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self.length} slots")
        other = type(self)(self._pool, self._context_length, self._model)
        states = self.states.fork(min(length, self.shareable_length))
        try:
            other.reserve(states.held)
        except CacheFull:
            return other
        super(MlxSequence, other).commit(states.held)
        other._states, other.tokens = states, self.tokens[: states.held]
        other._shareable_length = states.held
        mx.eval(states.arrays())
        return other

    def close(self) -> None:
        """Give all slots back."""
        super().close()
        self._states = None
        self.tokens = []
        self._block = ()
        self._shareable_length = 0
