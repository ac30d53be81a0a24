"""A sequence of a model with recurrent layers: its tokens, and states to go back to.

Keys and values can be cut anywhere; the state of recurrent layers cannot. The library stores the
states after the last rows of a pass, so rejected drafts cost nothing. Otherwise a *checkpoint*, a
copy of the state after some token, is restored, and the tokens after it run again:

    up to 15 rejected drafts                   a state of the library
    more rejected drafts than rows in a pass   checkpoint before the block, and some rows again
    the next turn of a chat, and forks         checkpoint at the end of a prompt, or shortly before
    other prompts with the same beginning      checkpoint where a fork could not begin
    a draft model goes back several passes     checkpoint where it went back to the last time

Invariant: a checkpoint covers exactly the tokens before it, whose keys and values are in the
sequence's context or in its evicted state; rows that run again do so in their original phase.
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
"""A long prompt has a checkpoint at a multiple of 32, at least 16 tokens before its end: in the
next turn of a chat the last tokens may differ, such as those that begin the reasoning."""

_LONG = 64
"""Minimum rows before that checkpoint: for fewer, a separate pass is not worthwhile."""

_PROMPT_CHECKPOINTS = 2
"""Maximum checkpoints in the prompt, besides one for forks; in the answer there is one."""


class Checkpoint(NamedTuple):
    at: int
    state: State
    shareable: bool
    """True if all the tokens were prefilled."""


class RecurrentSequence(LlamaSequence):
    def __init__(self, pool: BlockPool, context_length: int, contexts: Contexts) -> None:
        super().__init__(pool, context_length, contexts)
        self._tokens: list[int] = []
        self._prefilled: list[bool] = []  # per token
        self._marks: set[int] = set()  # rows of the block whose preceding states are kept
        self._checkpoints: list[Checkpoint] = []  # ascending
        self._branch = 0  # requested length where this fork could not begin, or its last rewind

    def prepare(self, place: NativeSequence, run: Callable[[Block], object]) -> None:
        """Go back to `length` tokens, or to an earlier checkpoint and rerun the rows after it."""
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
        """Save the state after `rows` rows of the block if they end at a mark."""
        if rows in self._marks and place.length:
            prompt = self.shareable_length
            self._keep(place, prompt == self.length or place.length <= prompt)

    def failed(self) -> None:
        self._checkpoints = []
        self._contexts.forget(self)

    def commit(self, rows: int) -> None:
        tokens, prefill = self._block.tokens, self._block.prefill
        # Before the length: Ctrl-C in between leaves extra tokens, which are overwritten.
        self._tokens[self.length :] = tokens[:rows]
        self._prefilled[self.length :] = [prefill] * rows
        super().commit(rows)
        self._cut()

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._branch = self.length  # where it may go back to again
        del self._tokens[self.length :], self._prefilled[self.length :]
        self._cut()

    def fork_length(self, length: int) -> int:
        return max((checkpoint.at for checkpoint in self._shared(length)), default=0)

    def fork(self, length: int) -> Self:
        """Create a sequence that begins with a checkpoint of this one, up to `length` tokens.

        It adds its own checkpoint when it reaches `length`: a prefix that was requested twice is
        likely to be requested again.
        """
        fork = super().fork(length)
        fork._branch = min(length, self.shareable_length)
        return fork

    def close(self) -> None:
        super().close()
        self._tokens, self._prefilled, self._checkpoints = [], [], []

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
        """Save the context's state, and limit the checkpoints of its kind."""
        newest = Checkpoint(place.length, place.state(PARTIAL_STATE), shareable)
        others = [other for other in self._checkpoints if other.at != newest.at]
        max_checkpoints = _PROMPT_CHECKPOINTS if shareable else 1
        kind = [
            other for other in others if other.shareable == shareable and other.at != self._branch
        ]
        for oldest in kind[: max(len(kind) + 1 - max_checkpoints, 0)]:
            others.remove(oldest)
        self._checkpoints = sorted([*others, newest], key=lambda checkpoint: checkpoint.at)

    def _cut(self) -> None:
        """Drop everything after `length`; the context goes back at its next use."""
        self._drop_checkpoints()
        self._contexts.shorten(self, self.length)

    def _drop_checkpoints(self) -> None:
        self._checkpoints = [kept for kept in self._checkpoints if kept.at <= self.length]
