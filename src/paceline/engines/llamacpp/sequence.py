"""One sequence of the engine: its slots, and where its keys and values are.

They are in a *context* while the sequence runs, and in a *state*, a plain array, while it waits: a
context also holds the memory of calls, so few exist. KV blocks only count slots. A fork starts from
a state; so sequences share nothing, and each has slots of its own.
"""

from typing import Self

from paceline.engines.kv_blocks import BlockPool, PrefillTable
from paceline.engines.llamacpp.binding import NativeContext
from paceline.engines.llamacpp.contexts import Contexts
from paceline.errors import CacheFull


class LlamaSequence(PrefillTable):
    """See `KVSequence` in `engines/base.py`. Prompts and answers have row classes of their own."""

    def __init__(self, pool: BlockPool, context_length: int, contexts: Contexts) -> None:
        """An empty sequence."""
        super().__init__(pool, context_length)
        self._contexts = contexts

    def context(self, rows: int) -> NativeContext:
        """Its context, with keys and values of `length` slots and room for `rows` rows."""
        return self._contexts.of(self, self.length, self.length + rows)

    def fork_length(self, length: int) -> int:
        """The length that `fork(length)` would have, if the cache has slots for it."""
        return min(length, self.shareable_length)

    def fork(self, length: int) -> Self:
        """A new sequence with up to `length` prefilled slots of this one."""
        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self.length} slots")
        fork = type(self)(self._pool, self._context_length, self._contexts)
        shared = self.fork_length(length)
        if not shared:
            return fork
        try:
            fork.reserve(shared)
        except CacheFull:
            return fork
        super(LlamaSequence, fork).commit(shared)
        fork._shareable_length = shared
        self._contexts.copy(self, fork, self.length, shared)
        return fork

    def close(self) -> None:
        """Free all slots."""
        super().close()
        self._contexts.forget(self)
