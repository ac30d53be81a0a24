"""One sequence of the engine: its slots, and where its keys and values are.

They are in a *place* of a context while the sequence runs, and in a *state*, a plain array, while
it waits: a context also holds the memory of calls, so few exist. KV blocks only count slots. A fork
starts from a state; so sequences share nothing, and each has slots of its own. `call` runs a part
of a block.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Self

from paceline.decoding.types import Block, Logits, Taps
from paceline.engines.base import KVState
from paceline.engines.kv_blocks import BlockPool, PrefillTable
from paceline.engines.llamacpp.contexts import Contexts, Parked
from paceline.engines.llamacpp.native import NativeSequence
from paceline.engines.rows import RowRange
from paceline.errors import CacheFull, ModelError

PADDING = 0
"""Token of padding rows; every vocabulary has it."""


class LlamaSequence(PrefillTable):
    def __init__(self, pool: BlockPool, context_length: int, contexts: Contexts) -> None:
        super().__init__(pool, context_length)
        self._contexts = contexts
        self.taps: Taps = {}
        """Hidden states of the rows of its last block."""

    @property
    def parked(self) -> bool:
        return not self._contexts.lent_to(self)

    def place(self, rows: int) -> NativeSequence:
        """Its place with room for `rows` rows; `prepare` makes it hold `length` slots."""
        return self._contexts.of(self, self.length + rows)

    def prepare(self, place: NativeSequence, run: Callable[[Block], object]) -> None:
        """Drop what the sequence does not have; compute again, by `run`, what is missing."""
        if place.length > self.length:
            place.truncate(self.length)

    def parts(self, block: Block, at: int, rows: RowRange, outputs: int) -> list[slice]:
        """Rows of a block, by calls.

        Args:
            block: the block.
            at: tokens before it.
            rows: numbers of rows of a call.
            outputs: most rows of a call that get logits: more rows with logits have calls of their
                own, which are padded as any.
        """
        count, span = len(block.tokens), self._contexts.span
        # Bits depend on keys up to the call's last row, in steps of `span`. With calls of 4 rows,
        # row 252 is the last one whose padded call ends before 256; those after it go together.
        last = at + rows.least - 1 if self._contexts.counts_padding else at
        cuts = range(span - last % span, count, span) if span else ()
        return parts_between(block, {0, *cuts, count}, rows, outputs)

    def on_rows_computed(self, place: NativeSequence, rows: int) -> None:
        """Rows of the block, of which `rows` are in the context."""

    def failed(self) -> None:
        """A call of the sequence failed, or was interrupted."""

    def fork_length(self, length: int) -> int:
        return min(length, self.shareable_length)

    def fork(self, length: int) -> Self:
        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self.length} slots")
        fork = type(self)(self._pool, self._context_length, self._contexts)
        fork.shares_answers = self.shares_answers
        shared = self.fork_length(length)
        if not shared:
            return fork
        try:
            fork.reserve(shared)
        except CacheFull:
            return fork
        super(LlamaSequence, fork).commit(shared)
        fork._shareable_length = shared
        self._copy(fork, shared)
        return fork

    def _copy(self, fork: Self, shared: int) -> None:
        self._contexts.copy(self, fork, shared)

    def restore(self, state: KVState, length: int) -> None:
        """Hold the first `length` slots of a state; see `KeepsKV`."""
        self.close()
        self.reserve(length)
        super().commit(length)
        self._shareable_length = length
        self._contexts.park(self, Parked(state.data, state.length, length))
        try:
            self.place(1)  # the library reads it
        except ModelError:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        self._contexts.forget(self)


def parts_between(block: Block, cuts: set[int], rows: RowRange, outputs: int) -> list[slice]:
    """Rows of a block by calls that cross none of `cuts`; see `LlamaSequence.parts`."""
    first = len(block.tokens) - block.rows
    ends = sorted(cuts | {first} if block.rows > outputs else cuts)
    parts = []
    for start, stop in pairwise(ends):
        most = min(rows.most, outputs) if start >= first else rows.most
        inner = RowRange(rows.least, most).split(stop - start)
        parts += [slice(start + part.start, start + part.stop) for part in inner]
    return parts


def call(
    place: NativeSequence,
    tokens: Sequence[int],
    part: slice,
    *,
    first: int,
    least: int,
    least_outputs: int,
) -> Logits:
    """Run a part of a block in one call; logits of its rows from the block's row `first` on.

    Where these are fewer than `least_outputs`, rows beside them get logits, too.
    """
    rows = tokens[part]
    padded = [*rows, *[PADDING] * (least - len(rows))]
    start = place.length
    output = min(max(first - part.start, 0), len(rows))  # the first row that gets logits
    begin = min(output, max(len(padded) - least_outputs, 0))
    end = max(len(rows), begin + least_outputs) if output < len(rows) else begin
    logits = place.decode(padded, slice(begin, end))[output - begin : len(rows) - begin]
    place.truncate(start + len(rows))
    return logits
