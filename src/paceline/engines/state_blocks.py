"""Recurrent states of hybrid models: a pool of state blocks, and the states of every sequence.

A *state* is what all recurrent layers (short convolutions, gated delta rules) hold after some
number of tokens. Unlike KV it cannot be cut: going back to an earlier token takes the state from
there. A call reads one block of a sequence and writes others, a block per row in decode, so that
accepting rows is keeping a block. A prompt of 8 tokens in KV blocks of 4, then a token and its
draft:

    prefill     reads the block of zeros, writes blocks 9 and 3: the states after 4 and 8 tokens
    a b c       reads block 3, writes blocks 6, 1, 4: the states after 9, 10 and 11 tokens
    commit(2)   keeps block 1 for the next call, and blocks 9 and 3 as checkpoints: these states are
                at the end of a KV block, so a fork can start there; blocks 6 and 4 are free
    rewind(9)   there is no state after 9 tokens any more: `missing_rows` says to run `a` again,
                after 8 tokens, from block 3

A state can always be computed again from the tokens. So every state that the call in progress does
not read may be evicted, the least recently used one first, and memory is bounded by the pool.

Independent of models and tensors. Invariant: a state is used with exactly the tokens before it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple, Self

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import BlockPool, PrefillTable
from paceline.errors import CacheFull

_CHECKPOINTS = 4
"""Most checkpoints that a sequence keeps besides those that other sequences share."""

_PREFILL_BLOCKS = 3
"""Most states that a prefill block writes: two checkpoints and its end."""

_ROWS_AGAIN = 64
"""Most rows that a call runs again. A call of more may give a row other bits (`gguf_rows`)."""


class State:
    """The state after `at` tokens, in a block of the pool; None when it was evicted."""

    __slots__ = ("at", "block", "call", "holders")

    def __init__(self, at: int, block: int) -> None:
        """A state that one sequence holds."""
        self.at = at
        self.block: int | None = block
        self.holders = 1
        """Sequences that hold the state."""
        self.call = 0
        """Number of the last call that used it."""


class StatePool:
    """Allocates state blocks, and evicts the least recently used states."""

    def __init__(self, blocks: int) -> None:
        """A pool of `blocks` state blocks."""
        self.blocks = blocks
        self.zero = blocks
        """One more block, of zeros, which is only read: the state of an empty sequence."""
        self.spare = blocks + 1
        """One more block for states that are not read."""
        self._free = list(range(blocks - 1, -1, -1))
        self._states: OrderedDict[State, None] = OrderedDict()  # least recently used first
        self._call = 0
        self._used = 0  # states that the call in progress uses

    @property
    def free(self) -> int:
        """Blocks that nothing holds."""
        return len(self._free)

    @property
    def most_sequences(self) -> int:
        """Sequences that one call can always run: all read a state, and a prefill writes most."""
        return max(self.blocks // (1 + _PREFILL_BLOCKS), 1)

    @property
    def available(self) -> int:
        """Blocks that the call in progress can take: free ones, and those of evictable states."""
        return len(self._free) + len(self._states) - self._used

    def begin_call(self) -> None:
        """Begin a call: states are evictable again."""
        self._call += 1
        self._used = 0

    def use(self, state: State) -> None:
        """Protect a state from eviction in the call in progress."""
        if state.call != self._call:
            state.call = self._call
            self._used += 1
        self._states.move_to_end(state)

    def take(self, at: int) -> State:
        """Allocate a block for the state after `at` tokens, which the call in progress writes.

        Raises CacheFull if the call uses all blocks.
        """
        if not self._free:
            if not self.available:
                raise CacheFull(
                    f"the call needs more than {self.blocks} state blocks; run fewer sequences at "
                    "once"
                )
            self._forget(next(iter(self._states)))
        state = State(at, self._free.pop())
        self._states[state] = None
        self.use(state)
        return state

    def share(self, state: State) -> State:
        """Add a holder to a state."""
        state.holders += 1
        return state

    def drop(self, state: State) -> None:
        """Remove a holder; the block is free after the last."""
        state.holders -= 1
        if not state.holders and state.block is not None:
            self._forget(state)

    def _forget(self, state: State) -> None:
        assert state.block is not None
        self._free.append(state.block)
        state.block = None
        del self._states[state]
        self._used -= state.call == self._call


class StateRows(NamedTuple):
    """Rows of one sequence in a call, as the recurrent layers take them."""

    blocks: list[int]
    """The block to read, then those to write."""
    interval: int
    """A state is written at every multiple of it in tokens, and at the end; 0: at the end alone."""


class StateTable(PrefillTable):
    """One sequence of a hybrid model: its KV blocks, its tokens and its states."""

    def __init__(self, pool: BlockPool, states: StatePool, context_length: int) -> None:
        """An empty sequence that can grow to `context_length` slots."""
        super().__init__(pool, context_length)
        self._state_pool = states
        self._states: list[State] = []  # ascending
        self._tokens: list[int] = []
        self._block: Sequence[int] = ()
        self._written: dict[int, State] = {}  # by `at`: what the last call wrote
        self._branch = 0

    def missing_rows(self) -> tuple[int, Block] | None:
        """Tokens before the rows to run again before the next block, and these rows.

        None if the state at `length` is there. The rows have the phase in which they were run
        first, and ask for no logits; call `keep_written` after running them.
        """
        state = self._last(self.length)
        at = 0 if state is None else state.at
        if at == self.length:
            return None
        prefill = at < self.shareable_length
        end = self.shareable_length if prefill else self.length
        end = min(end, at + _ROWS_AGAIN)
        return at, Block(self._tokens[at:end], 0, prefill=prefill)

    def protect(self, at: int) -> None:
        """Protect the state after `at` tokens, or the one to recompute it from, in this call.

        Drops what an earlier call wrote and no commit kept.
        """
        self._drop_written()
        if at == self.length:
            self._keep_states([state for state in self._states if state.at <= at])
        state = self._last(at)
        if state is not None:
            self._state_pool.use(state)

    def take_states(self, block: Block, at: int, most: int | None = None) -> None:
        """Allocate the blocks that a call writes.

        Args:
            block: its rows; `missing_rows` was None, or returned this block.
            at: tokens before the rows.
            most: most rows of a decode block that get a block; None: all. A commit to another row
                than these takes running rows again.

        Raises:
            CacheFull: there are too few state blocks; none is taken.
        """
        try:
            for tokens in self._points(block, at, most):
                self._written[tokens] = self._state_pool.take(tokens)
        except CacheFull:
            self._drop_written()
            raise

    def state_rows(self, rows: int, past: int) -> StateRows:
        """Rows after `past` tokens, padding included, with the blocks of `take_states`."""
        pool, state, end = self._state_pool, self._last(past), past + rows
        read = pool.zero if state is None or state.block is None else state.block
        assert past == (0 if state is None else state.at), "the state before the rows is missing"
        inner = [tokens for tokens in self._written if tokens < end]
        interval = gcd(*inner) if inner else 0
        written = list(range(past - past % interval + interval, end, interval)) if inner else []
        blocks = [self._written_block(tokens) for tokens in (*written, end)]
        return StateRows([read, *blocks], interval)

    def _written_block(self, tokens: int) -> int:
        """The block for the state after `tokens` tokens; the spare one if none was taken."""
        state = self._written.get(tokens)
        return self._state_pool.spare if state is None or state.block is None else state.block

    def keep_written(self) -> None:
        """Keep the states of a call that ran `missing_rows`, or a part of the next block."""
        self._keep_until(max(self._written))

    def ran(self, block: Block) -> None:
        """Record the block that was run last."""
        super().ran(block)
        self._block = block.tokens

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block, and the state after them."""
        super().commit(rows)
        self._tokens += self._block[:rows]
        self._block = self._block[rows:]
        self._keep_until(self.length)

    def rewind(self, length: int) -> None:
        """Drop all slots from `length` on; see `BlockTable.rewind`."""
        super().rewind(length)
        self._drop_written()
        del self._tokens[self.length :]
        self._keep_states([state for state in self._states if state.at <= self.length])

    def fork_length(self, length: int) -> int:
        """The length that `fork(length)` would have: that of a checkpoint."""
        return max((state.at for state in self._shared(length)), default=0)

    def fork(self, length: int) -> Self:
        """A new sequence that shares the slots up to the last checkpoint at or before `length`.

        It makes a checkpoint at `length` itself when it gets there: a prefix that was asked for
        twice is likely to be asked for again (as in Marconi, arXiv 2411.19379).
        """
        shared = self._shared(length)
        other = super().fork(shared[-1].at if shared else min(length, 0))
        other._states = [self._state_pool.share(state) for state in shared]
        other._tokens = self._tokens[: other.length]
        other._branch = super().fork_length(length)
        if shared:
            self._state_pool.use(shared[-1])
        return other

    def _shared(self, length: int) -> list[State]:
        """Checkpoints that a fork shares, ascending: a fork has whole KV blocks."""
        end, size = super().fork_length(length), self._pool.block_size
        return [state for state in self._alive() if state.at <= end and not state.at % size]

    def _new(self) -> Self:
        return type(self)(self._pool, self._state_pool, self._context_length)

    def close(self) -> None:
        """Free all KV and state blocks."""
        super().close()
        self._drop_written()
        self._keep_states([])
        self._tokens = []
        self._block = ()

    def _points(self, block: Block, start: int, most: int | None) -> list[int]:
        """Positions in tokens whose states a call writes, ascending; the last is its end."""
        end = start + len(block.tokens)
        if block.prefill:
            size = self._pool.block_size
            # The end of a prompt is no prefix of the same prompt: its last token is always run.
            aligned = (end - (block.rows > 0)) // size * size
            return sorted({end, *(at for at in (self._branch, aligned) if start < at < end)})
        if not block.rows:  # rows that are computed again, and kept as a whole
            return [end]
        kept = len(block.tokens) if most is None else min(most, len(block.tokens))
        return [*range(start + 1, start + kept), end]

    def _keep_until(self, last: int) -> None:
        """Keep the last state up to `last` tokens, and checkpoints before it; drop the rest."""
        # What another call evicted before this one was committed is lost.
        self._states += [state for state in self._written.values() if state.at <= last]
        dropped = [state for state in self._written.values() if state.at > last]
        self._written = {}
        for state in dropped:
            self._state_pool.drop(state)
        newest = self._last(last)
        last = 0 if newest is None else newest.at
        useful = [state for state in self._alive() if self._useful(state.at, last)]
        checkpoints = [
            state for state in useful if state.holders == 1 and state.at not in (self._branch, last)
        ]
        surplus = checkpoints[: max(len(checkpoints) - _CHECKPOINTS, 0)]
        self._keep_states([state for state in useful if state not in surplus])

    def _useful(self, at: int, last: int) -> bool:
        """Whether a state is the next call's, or a checkpoint: of whole KV blocks, or the end."""
        shareable = self.shareable_length
        if self._prefill and shareable == self.length:
            shareable = max(last, shareable)  # parts of a prompt that are not committed yet
        aligned = at <= shareable and not at % self._pool.block_size
        return aligned or at in (last, shareable)

    def _alive(self) -> list[State]:
        """States that were not evicted, ascending."""
        return [state for state in self._states if state.block is not None]

    def _last(self, length: int) -> State | None:
        """The last state at or before `length` tokens."""
        return max(
            (state for state in self._alive() if state.at <= length),
            key=lambda state: state.at,
            default=None,
        )

    def _keep_states(self, kept: list[State]) -> None:
        for state in self._states:
            if state not in kept:
                self._state_pool.drop(state)
        self._states = kept

    def _drop_written(self) -> None:
        for state in self._written.values():
            self._state_pool.drop(state)
        self._written = {}


def restore_and_take(
    pool: StatePool,
    call: Sequence[tuple[StateTable, Block, int]],
    run: Callable[[StateTable, Block, int], None],
) -> None:
    """Restore the states that a call reads, and allocate the blocks that it writes.

    If there are fewer blocks than rows, all decode blocks get the same number.

    Args:
        pool: of the sequences.
        call: (sequence, block, tokens before it): its next block, for which KV blocks are reserved,
            or a part of it that follows another part.
        run: runs rows of one sequence again; its last argument is the number of tokens before them.

    Raises:
        CacheFull: the call needs more blocks than the pool has. Nothing is reserved.
    """

    def protect() -> None:
        pool.begin_call()
        for table, _, past in call:
            table.protect(past)

    try:
        protect()
        for table, _, past in call:
            while past == table.length and (missing := table.missing_rows()):
                at, rows = missing
                table.take_states(rows, at)
                run(table, rows, at)
                table.keep_written()
                protect()  # of what was restored the call reads the last state alone
        decodes = sum(not block.prefill for _, block, _ in call)
        left = pool.available - _PREFILL_BLOCKS * (len(call) - decodes)
        most = max(left // max(decodes, 1), 1)
        for table, block, past in call:
            table.take_states(block, past, most=most)
    except CacheFull:
        for table, _, _ in call:
            table.rewind(table.length)
        raise
