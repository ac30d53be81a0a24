"""One sequence of the engine: its KV blocks, its tokens, and the caches that mlx-lm's model fills.

KV blocks only count slots; MLX's arrays grow on their own. A fork shares arrays until either
sequence writes to them, which makes a copy.
"""

from collections.abc import Sequence
from typing import Self

import mlx.core as mx

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import BlockPool, PrefillTable
from paceline.errors import CacheFull
from paceline_mlx.model import LoadedModel


class MlxSequence(PrefillTable):
    """An MLX `KVSequence` (`engines/base.py`). Prefill and decode may use different kernels."""

    def __init__(self, pool: BlockPool, context_length: int, model: LoadedModel) -> None:
        super().__init__(pool, context_length)
        self._model = model
        self.states = model.empty()
        """The model's caches; they may hold more or fewer than `length` slots."""
        self.tokens: list[int] = []
        """Committed tokens; they are run again where a recurrent state cannot be rolled back."""
        self._block: Sequence[int] = ()

    def ran(self, block: Block) -> None:
        super().ran(block)
        self._block = block.tokens

    def forget(self) -> None:
        """Drop the caches: their contents are unknown after a failed forward pass."""
        self.states = self._model.empty()
        self.rewind(self.length)  # the failed block cannot be committed

    def commit(self, rows: int) -> None:
        super().commit(rows)
        self.tokens += self._block[:rows]
        self._block = self._block[rows:]

    def rewind(self, length: int) -> None:
        super().rewind(length)
        del self.tokens[length:]
        self._block = ()

    def fork_length(self, length: int) -> int:
        return self.states.fork_length(min(length, self.shareable_length))

    def fork(self, length: int) -> Self:
        """Return a new sequence with up to `length` prefilled slots of this one.

        With recurrent layers, it ends at a position whose state was saved.
        """
        if length < 0:
            raise ValueError(f"cannot fork {length} slots of a sequence with {self.length}")
        other = type(self)(self._pool, self._context_length, self._model)
        states = self.states.fork(min(length, self.shareable_length))
        try:
            other.reserve(states.held)
        except CacheFull:
            return other
        super(MlxSequence, other).commit(states.held)
        other.states, other.tokens = states, self.tokens[: states.held]
        other._shareable_length = states.held
        mx.eval(states.arrays())
        return other

    def close(self) -> None:
        super().close()
        self.states = self._model.empty()
        self.tokens = []
        self._block = ()
