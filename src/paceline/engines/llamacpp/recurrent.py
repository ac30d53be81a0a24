"""A sequence of a model with recurrent layers: its tokens, and states to go back to.

Keys and values can be cut anywhere, the state of recurrent layers cannot. The library keeps the
states after the last rows of a call, so drafts that fall cost nothing. Other ways back start from a
*checkpoint*, a copy of the state after some token, and run the tokens after it again:

    drafts of up to 15 fall                    a state of the library
    more drafts than a call has rows fall      checkpoint before the block, and some rows again
    the next turn of a chat, and forks         checkpoint at the end of a prompt, or shortly before
    other prompts that begin alike             checkpoint where a fork wanted to begin
    a draft model goes back some calls         checkpoint where it went back to the last time

Invariant: a checkpoint is of exactly the tokens before it, whose keys and values are in the
sequence's context or in its parked state; rows that run again do so in the phase that they had.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import BlockPool
from paceline.engines.llamacpp.binding import PARTIAL_STATE, State
from paceline.engines.llamacpp.native import NativeSequence
from paceline.engines.llamacpp.sequence import Contexts, LlamaSequence, parts_between
from paceline.engines.rows import RowRange

_BEFORE_END, _ALIGNED = 16, 32
"""A long prompt has a checkpoint at a multiple of 32 that is 16 tokens or more before its end: the
next turn of a chat may have other tokens there, such as those that begin a thought."""

_LONG = 64
"""Rows of a prompt before that checkpoint: for fewer, a call of its own is not worth it."""

_PROMPT_CHECKPOINTS = 2
"""Checkpoints in the prompt, besides one that forks asked for; in the answer there is one."""


class Checkpoint(NamedTuple):
    at: int
    """Number of the tokens."""
    state: State
    shareable: bool
    """Whether all the tokens were prefilled."""


class RecurrentSequence(LlamaSequence):
    def __init__(self, pool: BlockPool, context_length: int, contexts: Contexts) -> None:
        super().__init__(pool, context_length, contexts)
        self._tokens: list[int] = []
        self._prefilled: list[bool] = []  # per token
        self._block = Block([], 0)  # what is not committed of the block that ran last
        self._marks: set[int] = set()  # rows of the block, before which its states are kept
        self._checkpoints: list[Checkpoint] = []  # ascending
        self._branch = 0  # where it was to begin as a fork, or went back to: a checkpoint stays

    def prepare(self, place: NativeSequence, run: Callable[[Block], object]) -> None:
        """Go back to `length` tokens, or to a checkpoint before, from which rows run again."""
        self._drop_checkpoints()
        if place.length > self.length and place.can_truncate(self.length):
            place.truncate(self.length)
        if place.length > self.length:
            if self._checkpoints:
                at, state, _ = self._checkpoints[-1]
                place.restore_recurrent(state, at)
            else:
                place.truncate(0)
        if place.length == self.length:
            return
        while (at := place.length) < self.length:
            prefill, end = self._prefilled[at], at
            while end < self.length and self._prefilled[end] == prefill:
                end += 1
            run(Block(self._tokens[at:end], 0, prefill=prefill))
        self._keep(place, self.shareable_length == self.length)

    def parts(self, block: Block, at: int, rows: RowRange, outputs: int) -> list[slice]:
        count, first = len(block.tokens), len(block.tokens) - block.rows
        cuts = {0, count}
        if block.prefill:
            near = (at + count - _BEFORE_END) // _ALIGNED * _ALIGNED - at
            branch = self._branch - at
            places = {near, branch} if near >= _LONG else {branch}
            self._marks = {place for place in places if 0 < place < first} | {count}
            cuts |= self._marks
        parts = parts_between(block, cuts, rows, outputs)
        if not block.prefill:
            self._marks = {0} if len(parts) > 1 else set()
        return parts

    def on_rows_computed(self, place: NativeSequence, rows: int) -> None:
        """Keep the state after `rows` rows of the block if they end at a mark."""
        if rows in self._marks and place.length:
            prompt = self.shareable_length
            self._keep(place, prompt == self.length or place.length <= prompt)

    def failed(self) -> None:
        self._checkpoints = []
        self._contexts.forget(self)

    def ran(self, block: Block) -> None:
        super().ran(block)
        self._block = block

    def commit(self, rows: int) -> None:
        tokens, prefill = self._block.tokens, self._block.prefill
        # Before the length: Ctrl-C in between leaves more than it says, which is overwritten.
        self._tokens[self.length :] = tokens[:rows]
        self._prefilled[self.length :] = [prefill] * rows
        super().commit(rows)
        self._block = Block(tokens[rows:], 0, prefill=prefill)
        self._cut()

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._branch = self.length  # where it may go back to again
        del self._tokens[self.length :], self._prefilled[self.length :]
        self._cut()

    def fork_length(self, length: int) -> int:
        return max((checkpoint.at for checkpoint in self._shared(length)), default=0)

    def fork(self, length: int) -> Self:
        """A new sequence that begins with a checkpoint of this one, up to `length` tokens.

        It makes a checkpoint at `length` itself when it gets there: a prefix that was asked for
        twice is likely to be asked for again.
        """
        fork = super().fork(length)
        fork._branch = min(length, self.shareable_length)
        return fork

    def close(self) -> None:
        super().close()
        self._tokens, self._prefilled, self._checkpoints = [], [], []
        self._block = Block([], 0)

    def _shared(self, length: int) -> list[Checkpoint]:
        end = min(length, self.shareable_length)
        return [
            checkpoint
            for checkpoint in self._checkpoints
            if checkpoint.shareable and checkpoint.at <= end
        ]

    def _copy(self, fork: Self, shared: int) -> None:
        fork._checkpoints = self._shared(shared)
        fork._tokens, fork._prefilled = self._tokens[:shared], self._prefilled[:shared]
        self._contexts.copy(self, fork, shared, fork._checkpoints[-1].state)

    def _keep(self, place: NativeSequence, shareable: bool) -> None:
        """Keep the state of the context, and as many checkpoints of its kind as are useful."""
        newest = Checkpoint(place.length, place.state(PARTIAL_STATE), shareable)
        others = [other for other in self._checkpoints if other.at != newest.at]
        most = _PROMPT_CHECKPOINTS if shareable else 1
        kind = [
            other for other in others if other.shareable == shareable and other.at != self._branch
        ]
        for oldest in kind[: max(len(kind) + 1 - most, 0)]:
            others.remove(oldest)
        self._checkpoints = sorted([*others, newest], key=lambda checkpoint: checkpoint.at)

    def _cut(self) -> None:
        """Drop what is beyond `length`; the context goes back when it is used next."""
        self._drop_checkpoints()
        self._contexts.shorten(self, self.length)

    def _drop_checkpoints(self) -> None:
        self._checkpoints = [kept for kept in self._checkpoints if kept.at <= self.length]
