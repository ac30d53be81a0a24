"""One request as a state machine: it hands out blocks, takes rows of logits, says what is final.

    generation = Generation(prompt, ...)
    while not generation.finished:
        block = generation.next_block()      # the policy asks drafters, and says how much to try
        logits = ...                         # run it: this file knows no engine and no clock
        step = generation.accept(logits)     # keeps the prefix that the target itself picks
        ...                                  # step.kept slots are now part of the sequence

It starts in the prompt (blocks are chunks of it, no drafts), goes on in the answer (blocks are the
last token and drafts), and ends finished. An answer that was preempted goes on after `restart`,
once its rows are computed again. What is final changes in `accept` and `cancel` alone. The rule it
must not break: the tokens are those that one row at a time would give, whatever was drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.decoding.logprobs import TokenLogprob, token_logprob
from paceline.decoding.repetition import Repetition, RepetitionDetector
from paceline.decoding.sampling import Sampler, Sampling
from paceline.decoding.text import Decode, TextPiece, TextStream
from paceline.decoding.types import (
    NO_PROPOSAL,
    Best,
    Block,
    ComputedBlock,
    Constraint,
    DecodeOutcome,
    Drafter,
    FinishReason,
    Logits,
    Pending,
    Policy,
    Proposal,
    Taps,
)

_RECOMPUTE_ROWS = 128
"""Rows of an answer that a call computes again at most: each reads all keys before it."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """When to end.

    Raises:
        ValueError: `max_tokens` is under 1, or a stop string is empty.
    """

    max_tokens: int | None = None
    """Tokens in the answer; None goes on to the context limit."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer. The one met is the last of `answer`, and not in the text."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text ends before the earliest one met."""
    min_tokens: int = 0
    """Tokens that come before `stop_token_ids` or a repetition may end the answer."""
    repetition: Repetition | None = None
    """End where the answer goes round in circles; None: go on."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected 1 or more")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is {self.min_tokens}; expected 0 or more")
        if not all(self.stop):
            raise ValueError("a stop string is empty; expected at least one character")


class Step(NamedTuple):
    """What one engine call brought."""

    kept: int
    """Rows of the block that are now part of the sequence: its length grows by this."""
    tokens: Sequence[int]
    """New tokens of the answer (empty inside the prompt)."""
    pieces: Sequence[TextPiece] = ()
    """The text that each of them completes. A step that only ends the answer has a piece for the
    text that was held back, and no token."""
    proposal: Proposal = NO_PROPOSAL
    """What the block tried behind the last token."""
    stood: int = 0
    """How many of its tokens the target picked too."""
    reasoning_tokens: int = 0
    """Tokens of reasoning in the answer up to here."""

    @property
    def text(self) -> str:
        """New text of the answer, which will not change any more."""
        return "".join(piece.final for piece in self.pieces)

    @property
    def reasoning(self) -> str:
        """New text of the model's reasoning, where its form is known."""
        return "".join(piece.reasoning for piece in self.pieces)

    @property
    def source(self) -> str:
        """Who proposed: a drafter's name, `none`, or `FORCED`."""
        return self.proposal.source

    @property
    def drafted(self) -> int:
        """How many of the block's tokens were guesses. What a constraint forces is none."""
        return 0 if self.source == FORCED else len(self.proposal.tokens)

    @property
    def accepted(self) -> int:
        """How many of the guesses stood."""
        return 0 if self.source == FORCED else self.stood

    @property
    def forced(self) -> int:
        """How many tokens came because nothing else could."""
        return self.stood if self.source == FORCED else 0


FORCED = "forced"
"""The source of a proposal that is no guess: its tokens are all that a constraint lets come."""


@dataclass(slots=True)
class Counters:
    """What happened, in steps and tokens; decode only, the prompt is not a step."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    drafted_at: list[int] = field(default_factory=list)
    """By position in the draft, the first at 0: how often there was a guess."""
    accepted_at: list[int] = field(default_factory=list)
    """By position in the draft: how often the guess stood."""

    def count(self, step: Step) -> None:
        """Count one decode step."""
        self.steps += 1
        self.forced += step.forced
        if drafted := step.drafted:
            accepted, source = step.accepted, step.source
            _count_places(self.drafted_at, drafted)
            _count_places(self.accepted_at, accepted)
            self.drafted += drafted
            self.accepted += accepted
            self.drafted_by[source] = self.drafted_by.get(source, 0) + drafted
            self.accepted_by[source] = self.accepted_by.get(source, 0) + accepted


def _count_places(counts: list[int], length: int) -> None:
    """Count the first `length` places once more."""
    counts += [0] * (length - len(counts))
    for place in range(length):
        counts[place] += 1


class Generation:
    """The state machine for one request; see the top of this file."""

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        vocab_size: int,
        context_length: int,
        sampling: Sampling,
        stopping: Stopping,
        drafters: Sequence[Drafter],
        policy: Policy,
        decode: Decode,
        cached: int = 0,
        prefill_chunk: int = 512,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        text: TextStream | None = None,
        counters: Counters | None = None,
    ) -> None:
        """Prepare a request.

        Args:
            prompt: token ids, at least one.
            vocab_size: tokens the target knows; prompt ids must be below it.
            context_length: the most tokens prompt and answer may have together.
            sampling: how the target picks.
            stopping: when to end.
            drafters: who may be asked to guess. Empty: plain.
            policy: who is asked, and how much is tried.
            decode: token ids -> text, special tokens left out.
            cached: how many of the prompt's first tokens the engine already has in its slots.
            prefill_chunk: the most prompt tokens in one block.
            constraint: which tokens may be picked; what it forces is not left to drafters.
            logprobs: keep how likely each token of the answer was, and so many of the most likely
                ones; None: keep nothing.
            prompt_logprobs: keep the same for the prompt, none of which may be cached.
            text: makes text of the tokens, and knows the stop strings; None: all of it is answer.
            counters: where steps and tokens are counted; None: an object of its own.

        Raises:
            ValueError: the prompt is empty, has unknown tokens, or leaves no room for an answer.
        """
        if not prompt:
            raise ValueError("the prompt is empty; expected at least one token")
        if len(prompt) >= context_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and the context holds {context_length}, the "
                "answer included; shorten the prompt"
            )
        if not (min(prompt) >= 0 and max(prompt) < vocab_size):
            raise ValueError(f"the prompt has token ids outside 0 to {vocab_size - 1}")
        if not 0 <= cached <= len(prompt):
            raise ValueError(f"cached is {cached}; expected 0 to {len(prompt)}")
        self.prompt_length = len(prompt)
        self.finish_reason: FinishReason | None = None
        self.counters = Counters() if counters is None else counters
        self._tokens = list(prompt)
        # The last prompt token is always run: its row picks the first token of the answer.
        self._length = min(cached, len(prompt) - 1)
        room = context_length - len(prompt)
        self._end = len(prompt) + min(stopping.max_tokens or room, room)
        self._stop_token_ids = stopping.stop_token_ids
        self._may_stop = len(prompt) + stopping.min_tokens
        self._repetition = RepetitionDetector(stopping.repetition) if stopping.repetition else None
        self._text = text or TextStream(decode, stopping.stop)
        self._sampler = Sampler(sampling, prompt, vocab_size, constraint)
        self._constraint = constraint
        self._drafters = drafters
        self.logprobs: list[TokenLogprob] = []
        """For each token of the answer how likely it was, if that is kept."""
        self.prompt_logprobs: list[TokenLogprob | None] = [None] if prompt_logprobs else []
        """The same for the prompt's tokens; None for the first, which nothing stands before."""
        self._top = logprobs
        self._best = (
            self._sampler.picks_argmax
            and logprobs is None
            and not prompt_logprobs
            and not stopping.min_tokens
            and not any(drafter.reads_logits for drafter in drafters)
        )
        self.policy = policy
        self._prefill_chunk = prefill_chunk
        self._block: Block | None = None
        self._recomputed: Block | None = None
        self._proposal = NO_PROPOSAL

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return list(self._tokens)

    @property
    def answer(self) -> list[int]:
        """The answer's tokens so far, an ending stop token included."""
        return self._tokens[self.prompt_length :]

    @property
    def length(self) -> int:
        """Slots of the engine's cache that belong to the sequence."""
        return self._length

    @property
    def count(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self._tokens)

    @property
    def prefilling(self) -> bool:
        """Whether the next block is a part of the prompt."""
        return len(self._tokens) == self.prompt_length

    @property
    def recomputing(self) -> bool:
        """Whether the next block computes rows again that were computed before a `restart`."""
        return not self.prefilling and self._length < len(self._tokens) - 1

    def restart(self, cached: int) -> None:
        """Go on in another sequence, which holds the prompt's first `cached` tokens.

        For an answer that was preempted. What follows them is computed again, every row in the role
        that it had: of the prompt as prefill, of the answer as decode, many rows to a call. Tokens,
        sampler, drafters and policy stay as they are, so the answer goes on to the same tokens.

        Raises:
            RuntimeError: there is no token of the answer yet: begin anew instead.
            ValueError: `cached` reaches beyond the prompt.
        """
        if self.prefilling or self.finished:
            raise RuntimeError("restart() is for an answer that has begun and has not ended")
        if not 0 <= cached <= self.prompt_length:
            raise ValueError(f"cached is {cached}; expected 0 to {self.prompt_length}")
        self._length = cached
        self._recomputed = None

    def next_block(self, most: int | None = None) -> Block:
        """What to run next, at slots [length, length + T). The same until `accept` is called.

        `most` is the most rows there are room for in the call, at least 1; None: as many as one
        likes.

        Raises:
            RuntimeError: the generation has finished.
        """
        if self.finished:
            raise RuntimeError("next_block() after the generation finished")
        if self.recomputing:
            if self._recomputed is None:
                self._recomputed = self._rows_again(most)
            return self._recomputed
        if self._block is None:
            self._block = self._prompt_chunk(most) if self.prefilling else self._draft_block(most)
        return self._block

    def accept(
        self,
        logits: Logits,
        *,
        best: Best | None = None,
        taps: Taps | None = None,
        seconds: float = 0.0,
    ) -> Step:
        """Take the block's rows, keep what stands, and learn from it.

        Args:
            logits: [block.rows, vocab] float32, only read; not looked at where there is `best`.
            best: each row's best token, if the block asked for no more and the engine says no more.
            taps: hidden states of all the block's rows, where a drafter asked for them.
            seconds: what the step took since the last one, for policies that measure.

        Returns:
            What is now final. Call `next_block` next, unless `finished`.

        Raises:
            RuntimeError: no block is out.
            ValueError: the number of rows is not what the block asked for.
        """
        if self._recomputed is not None:
            return self._accept_again(self._recomputed)
        block = self._block
        if block is None:
            raise RuntimeError("accept() without a block from next_block()")
        count = len(logits if best is None else best.tokens)
        if count != block.rows:
            raise ValueError(f"got {count} rows of logits; the block asked for {block.rows}")
        start = self._length
        prefilling = self.prefilling
        pieces = []
        first = len(self._tokens)
        rows = self._keep_prompt_logprobs(block, logits) if self.prompt_logprobs else range(count)
        for row in rows:
            token = self._pick(logits[row]) if best is None else int(best.tokens[row])
            pieces.append(self._append(token))
            new = len(self._tokens) - first
            if self.finished or new >= len(block.tokens) or token != block.tokens[new]:
                break
        tokens = self._tokens[first:]
        # In the answer every new token says that the row it was picked from is kept.
        kept = len(block.tokens) if prefilling else len(tokens)
        self._length += kept
        self._block = None
        draft = self._proposal.tokens
        stood = 0
        while stood < min(len(draft), len(tokens)) and draft[stood] == tokens[stood]:
            stood += 1
        step = Step(kept, tokens, pieces, self._proposal, stood, self._text.thought_tokens)
        computed = ComputedBlock(block.tokens, start, kept, logits, taps or {})
        for drafter in self._drafters:
            drafter.observe(computed)
        if not prefilling:
            self.counters.count(step)
            # An answer's end leaves the rest of the draft unjudged; what is forced says nothing.
            if not self.finished and self._proposal.source != FORCED:
                self.policy.observe(DecodeOutcome(self._proposal, step.accepted, seconds, tokens))
        self._proposal = NO_PROPOSAL
        return step

    @property
    def thought_tokens(self) -> int:
        """How many tokens of the answer are thoughts, their marks included."""
        return self._text.thought_tokens

    def close(self) -> None:
        """Let the drafters give back what they hold. Nothing is drafted any more."""
        for drafter in self._drafters:
            drafter.close()

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> TextPiece:
        """End here, if it has not ended; return the text that was held back.

        `reason` is `LENGTH` where the engine has no slots for more.
        """
        if self.finished:
            return TextPiece()
        self._block = self._recomputed = None
        self.finish_reason = reason
        return self._text.finish()

    def _pick(self, row: Logits) -> int:
        position = len(self._tokens)
        token = self._sampler.pick(
            row, position, self._stop_token_ids if position < self._may_stop else ()
        )
        if self._top is not None:
            self.logprobs.append(token_logprob(row, token, self._top))
        return token

    def _keep_prompt_logprobs(self, block: Block, logits: Logits) -> range:
        """Keep what a chunk's rows say of the prompt; the rows that say something of the answer."""
        if not self.prefilling:
            return range(len(logits))
        known = min(len(block.tokens), self.prompt_length - 1 - self._length)
        for row, token in enumerate(self._tokens[self._length + 1 : self._length + 1 + known]):
            self.prompt_logprobs.append(token_logprob(logits[row], token, self._top or 0))
        return range(known, len(logits))

    def _rows_again(self, most: int | None) -> Block:
        """A block of what a restarted answer has to compute again: no row needs logits."""
        prompt = self._length < self.prompt_length
        end = self.prompt_length if prompt else len(self._tokens) - 1
        chunk = self._prefill_chunk if prompt else _RECOMPUTE_ROWS
        end = min(end, self._length + min(chunk, most or chunk))
        return Block(self._tokens[self._length : end], 0, self._best, prefill=prompt)

    def _accept_again(self, block: Block) -> Step:
        """Keep rows that were computed again; drafters and policy have seen them before."""
        self._recomputed = None
        self._length += len(block.tokens)
        return Step(len(block.tokens), ())

    def _prompt_chunk(self, most: int | None) -> Block:
        chunk = min(self._prefill_chunk, most or self._prefill_chunk)
        end = min(self._length + chunk, self.prompt_length)
        tokens = self._tokens[self._length : end]
        rows = len(tokens) if self.prompt_logprobs else int(end == self.prompt_length)
        return Block(tokens, rows, self._best, prefill=True)

    def _draft_block(self, most: int | None) -> Block:
        # A block of T rows can bring T tokens: more drafts than that could not be kept.
        room = self._end - len(self._tokens) - 1
        room = room if most is None else min(room, most - 1)
        forced = self._constraint.forced(room) if self._constraint and room > 0 else ()
        if forced:
            self._proposal = Proposal(forced, FORCED)
        elif room > 0:
            self._proposal = self.policy.draft(self._drafters, self._tokens, room)
            if self._constraint and self._proposal.tokens:
                possible = self._constraint.allowed_length(self._proposal.tokens)
                self._proposal = self._proposal.cut(possible)
        last, draft = self._tokens[-1], self._proposal.tokens
        for drafter in self._drafters:
            drafter.before_verify(self._tokens, draft)
        # What is still being computed is not waited for here.
        tokens = draft.after(last) if isinstance(draft, Pending) else [last, *draft]
        return Block(tokens, len(tokens), self._best)

    def _append(self, token: int) -> TextPiece:
        """Make `token` part of the answer; return the text that it completes."""
        self._tokens.append(token)
        self._sampler.push(token)
        repeats = self._repetition is not None and self._repetition.push(token)
        if token in self._stop_token_ids:
            self.finish_reason = FinishReason.STOP
            return self._text.finish()
        piece = self._text.push(token)
        if len(self._tokens) == self._end:
            self.finish_reason = FinishReason.LENGTH
        elif repeats and len(self._tokens) >= self._may_stop:
            self.finish_reason = FinishReason.REPETITION
        if self.finish_reason is not None:
            piece += self._text.finish()
        if self._text.stopped_by is not None:
            self.finish_reason = FinishReason.STOP
        return piece
