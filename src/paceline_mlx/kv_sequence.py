"""One sequence of the engine: its KV blocks, its tokens, and the caches that mlx-lm's model fills.

KV blocks only count slots; MLX's arrays grow on their own. A fork shares arrays until either
sequence writes to them, which makes a copy.
"""

from typing import Self

import mlx.core as mx

from paceline.engines.kv_blocks import BlockPool, BlockTable
from paceline_mlx.model import LoadedModel


class MlxSequence(BlockTable):
    """An MLX `KVSequence` (`engines/base.py`). Prefill and decode may use different kernels."""

    def __init__(self, pool: BlockPool, context_length: int, model: LoadedModel) -> None:
        super().__init__(pool, context_length)
        self._model = model
        self.states = model.empty()
        """The model's caches; they may hold more or fewer than `length` slots."""
        self.tokens: list[int] = []
        """Committed tokens; they are run again where a recurrent state cannot be rolled back."""

    def forget(self) -> None:
        """Drop the caches: their contents are unknown after a failed forward pass."""
        self.states = self._model.empty()
        self.rewind(self.length)  # the failed block cannot be committed

    def commit(self, rows: int) -> None:
        tokens = self._block.tokens[:rows]
        super().commit(rows)
        self.tokens += tokens

    def rewind(self, length: int) -> None:
        super().rewind(length)
        del self.tokens[length:]

    def fork_length(self, length: int) -> int:
        """Return `fork`'s length: with recurrent layers, a position whose state was saved."""
        return self.states.fork_length(min(length, self.shareable_length))

    def _new(self) -> Self:
        return type(self)(self._pool, self._context_length, self._model)

    def _copy(self, fork: Self, shared: int) -> None:
        fork.states, fork.tokens = self.states.fork(shared), self.tokens[:shared]
        mx.eval(fork.states.arrays())

    def close(self) -> None:
        super().close()
        self.states = self._model.empty()
        self.tokens = []
