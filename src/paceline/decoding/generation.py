"""One request as a state machine: it returns blocks, takes their logits, and appends tokens.

    generation = Generation(prompt, target, rules, speculation)
    while not generation.finished:
        block = generation.next_block()      # the policy runs drafters and cuts the draft
        logits = ...                         # run it: no engine and no clock in this file
        step = generation.accept(logits)     # keeps the prefix that the target itself picks
        ...                                  # step.accepted_rows slots are now part of the sequence

It starts in prefill (blocks are chunks of the prompt), continues in decode (blocks are the last
token and a draft), and ends finished. A preempted response continues after `restart`, once its rows
are recomputed. Only `accept` and `cancel` change tokens and text. Invariant: the tokens are those
of decoding one row at a time, whatever was drafted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.decoding.reasoning import ReasoningMarks, answer_text
from paceline.decoding.sampling import Sampler, Sampling, token_logprob
from paceline.decoding.stopping import RepetitionDetector, Stopping
from paceline.decoding.text import Decode, showing
from paceline.decoding.types import (
    FORCED,
    NO_PROPOSAL,
    NO_TOKEN,
    Best,
    Block,
    ComputedBlock,
    Constraint,
    Counters,
    DecodeOutcome,
    DeferredRows,
    Drafter,
    FinishReason,
    Logits,
    Piece,
    Policy,
    Proposal,
    Step,
    Taps,
    TokenLogprob,
)

_RECOMPUTE_ROWS = 128
"""Maximum recomputed decode rows per forward pass: each row reads all keys before it."""


@dataclass(frozen=True, slots=True)
class Target:
    vocab_size: int
    context_length: int
    """Maximum tokens of prompt and response together."""
    decode: Decode
    """Token ids -> text, without special tokens."""
    name: Callable[[int], str] = lambda _: ""
    """Token -> its text, for logprobs."""
    prefill_chunk: int = 512
    """Maximum prompt tokens in one block."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a response: sampling, ends, structure and logprobs."""

    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    constraint: Constraint | None = None
    """Restricts the tokens; tokens that it forces are not drafted."""
    logprobs: int | None = None
    """Number of most likely tokens recorded with each token's logprob; None: no logprobs."""
    prompt_logprobs: bool = False
    """Record the same for the prompt, whose tokens must not be cached."""
    reasoning: ReasoningMarks | None = None
    """The delimiters of reasoning; None: all text is the response."""
    shown: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that are part of the text: id -> text."""


@dataclass(frozen=True, slots=True)
class Speculation:
    policy: Policy
    """Chooses the drafters and the draft length."""
    drafters: Sequence[Drafter] = ()
    """Drafters available to the policy; empty: plain decoding."""
    counters: Counters = field(default_factory=Counters)
    """Counts steps and tokens."""


class Generation:
    def __init__(
        self,
        prompt: Sequence[int],
        target: Target,
        rules: Rules,
        speculation: Speculation,
        cached: int = 0,
    ) -> None:
        """Prepare a response to `prompt`; the engine has the KV of its first `cached` tokens.

        Raises ValueError if the prompt is empty or fills the context, a bias names an unknown
        token, or a stop string is empty.
        """
        context_length, stopping = target.context_length, rules.stopping
        if not prompt:
            raise ValueError("the prompt is empty; expected at least one token")
        if len(prompt) >= context_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and the context holds {context_length}, the "
                "answer included; shorten the prompt"
            )
        if not 0 <= cached <= len(prompt):
            raise ValueError(f"cached is {cached}; expected 0 to {len(prompt)}")
        self.prompt_length = len(prompt)
        self.finish_reason: FinishReason | None = None
        self.counters = speculation.counters
        self._tokens = list(prompt)
        # The last prompt token is always run: its logits choose the first token of the response.
        self.length = min(cached, len(prompt) - 1)
        """KV slots that belong to the sequence."""
        free = context_length - len(prompt)
        self._end = len(prompt) + min(stopping.max_tokens or free, free)
        self._stop_token_ids = stopping.stop_token_ids
        self._may_stop = len(prompt) + stopping.min_tokens
        self._repetition = RepetitionDetector(stopping.repetition) if stopping.repetition else None
        decode = showing(target.decode, rules.shown)
        self.text = answer_text(decode, stopping.stop, rules.reasoning)
        """Text of the response so far: its `stopped_by` and `reasoning_tokens`."""
        self._constraint = rules.constraint
        self._sampler = Sampler(rules.sampling, prompt, target.vocab_size, rules.constraint)
        self._drafters = speculation.drafters
        self.logprobs: list[TokenLogprob] = []
        """One per token of the response, if recorded."""
        self.prompt_logprobs: list[TokenLogprob | None] = [None] if rules.prompt_logprobs else []
        """One per token of the prompt, if recorded; None for the first, which has no logits."""
        self._top, self._name = rules.logprobs, target.name
        self._best = (
            self._sampler.picks_argmax
            and rules.logprobs is None
            and not rules.prompt_logprobs
            and not stopping.min_tokens
        )
        self.policy = speculation.policy
        self._prefill_chunk = target.prefill_chunk
        self._block: Block | None = None
        self._recompute: Block | None = None
        self._proposal = NO_PROPOSAL

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        return list(self._tokens)

    @property
    def answer(self) -> list[int]:
        """The response's tokens so far, including an ending stop token."""
        return self._tokens[self.prompt_length :]

    @property
    def token_count(self) -> int:
        return len(self._tokens)

    @property
    def prefilling(self) -> bool:
        return len(self._tokens) == self.prompt_length

    @property
    def recomputing(self) -> bool:
        return not self.prefilling and self.length < len(self._tokens) - 1

    def restart(self, cached: int) -> None:
        """Continue a preempted response in a sequence with the prompt's first `cached` tokens.

        The remaining rows are recomputed in their original phase: the prompt as prefill, the
        response as decode, many rows per forward pass. Tokens, sampler, drafters and policy keep
        their state, so the response continues with the same tokens.

        Raises:
            RuntimeError: the response has no token yet, or has ended.
            ValueError: `cached` exceeds the prompt.
        """
        if self.prefilling or self.finished:
            raise RuntimeError("restart() is for an answer that has begun and has not ended")
        if not 0 <= cached <= self.prompt_length:
            raise ValueError(f"cached is {cached}; expected 0 to {self.prompt_length}")
        self.length = cached
        self._recompute = None

    def next_block(self, max_rows: int | None = None) -> Block:
        """Return the next block, at slots [length, length + T); the same one until `accept`.

        `max_rows` bounds its rows, and is at least 1; None: no bound. Raises RuntimeError if the
        generation has finished.
        """
        if self.finished:
            raise RuntimeError("next_block() after the generation finished")
        if self.recomputing:
            self._recompute = self._recompute or self._known_block(max_rows)
            return self._recompute
        if self._block is None:
            compose = self._known_block if self.prefilling else self._decode_block
            self._block = compose(max_rows)
        return self._block

    def accept(
        self,
        logits: Logits,
        *,
        best: Best | None = None,
        taps: Taps | None = None,
        seconds: float = 0.0,
    ) -> Step:
        """Sample from the block's logits and keep its accepted rows.

        Args:
            logits: [block.rows, vocab] float32, not changed; ignored if `best` is given.
            best: argmax of each row, if the block needs nothing more.
            taps: hidden states of all the block's rows, for drafters that need them.
            seconds: time since the last step, for policies that measure.

        Returns:
            The new tokens and text. Call `next_block` next, unless `finished`.

        Raises:
            RuntimeError: `next_block` was not called before.
            ValueError: wrong number of rows.
        """
        if (block := self._recompute) is not None:  # drafters and policy observed its rows before
            self._recompute = None
            self.length += len(block.tokens)
            return Step(len(block.tokens))
        if (block := self._block) is None:
            raise RuntimeError("accept() without a block from next_block()")
        count = len(logits if best is None else best.tokens)
        if count != block.rows:
            raise ValueError(f"got {count} rows of logits; the block asked for {block.rows}")
        start = self.length
        prefilling = self.prefilling
        draft, pieces = self._proposal.tokens, list[Piece]()
        rows = self._keep_prompt_logprobs(block, logits) if self.prompt_logprobs else range(count)
        for row in rows:
            token = self._pick(logits[row]) if best is None else int(best.tokens[row])
            matches = len(pieces) < len(draft) and token == draft[len(pieces)]
            source = self._proposal.source if matches else None
            logprobs = None if self._top is None else self.logprobs[-1]
            pieces.append(Piece(*self._append(token)[:4], source, logprobs))
            if self.finished or not matches:
                break
        # In decode, a row is kept if a token was picked from it.
        accepted_rows = len(block.tokens) if prefilling else len(pieces)
        self.length += accepted_rows
        self._block = None
        step = Step(accepted_rows, pieces, self._proposal, self.text.reasoning_tokens)
        computed = ComputedBlock(block.tokens, start, accepted_rows, taps or {})
        for drafter in self._drafters:
            drafter.observe(computed)
        if not prefilling:
            self.counters.count(step)
            # The end of a response leaves the rest of its draft unverified.
            if not self.finished and self._proposal.source != FORCED:
                outcome = DecodeOutcome(self._proposal, step.accepted, seconds, step.tokens)
                self.policy.observe(outcome)
        self._proposal = NO_PROPOSAL
        return step

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> Piece:
        """End the response, unless it has ended; return the text that was held back.

        `reason` is `LENGTH` if the engine has no slots left.
        """
        if self.finished:
            return NO_TOKEN
        self._block = self._recompute = None
        self.finish_reason = reason
        return self.text.finish()

    def _pick(self, row: Logits) -> int:
        position = len(self._tokens)
        token = self._sampler.pick(
            row, position, self._stop_token_ids if position < self._may_stop else ()
        )
        if self._top is not None:
            self.logprobs.append(token_logprob(row, token, self._top, self._name))
        return token

    def _keep_prompt_logprobs(self, block: Block, logits: Logits) -> range:
        """Record a prefill chunk's logprobs; return the rows that choose tokens of the response."""
        if not self.prefilling:
            return range(len(logits))
        known = min(len(block.tokens), self.prompt_length - 1 - self.length)
        for row, token in enumerate(self._tokens[self.length + 1 : self.length + 1 + known]):
            logprob = token_logprob(logits[row], token, self._top or 0, self._name)
            self.prompt_logprobs.append(logprob)
        return range(known, len(logits))

    def _known_block(self, max_rows: int | None) -> Block:
        """Return a chunk of the prompt, or rows to recompute, which need no logits."""
        prompt = self.length < self.prompt_length
        last = self.prompt_length if prompt else len(self._tokens) - 1
        chunk = self._prefill_chunk if prompt else _RECOMPUTE_ROWS
        end = min(last, self.length + min(chunk, max_rows or chunk))
        tokens, rows = self._tokens[self.length : end], 0
        if self.prefilling:
            rows = len(tokens) if self.prompt_logprobs else int(end == last)
        return Block(tokens, rows, self._best, prefill=prompt)

    def _decode_block(self, max_rows: int | None) -> Block:
        # A block of T rows adds up to T tokens, so its draft is one token shorter than the rest.
        limit = self._end - len(self._tokens) - 1
        limit = limit if max_rows is None else min(limit, max_rows - 1)
        forced = self._constraint.forced(limit) if self._constraint and limit > 0 else ()
        if forced:
            self._proposal = Proposal(forced, FORCED)
        elif limit > 0:
            self._proposal = self.policy.draft(self._drafters, self._tokens, limit)
            if self._constraint and self._proposal.tokens:
                allowed = self._constraint.allowed_length(self._proposal.tokens)
                self._proposal = self._proposal.cut(allowed)
        last, draft = self._tokens[-1], self._proposal.tokens
        for drafter in self._drafters:
            drafter.before_verify(self._tokens, draft)
        # This does not wait for a pending draft.
        tokens = draft.after(last) if isinstance(draft, DeferredRows) else [last, *draft]
        return Block(tokens, len(tokens), self._best)

    def _append(self, token: int) -> Piece:
        """Append `token` to the response; return it with the text that it completes."""
        self._tokens.append(token)
        self._sampler.push(token)
        repeats = self._repetition is not None and self._repetition.push(token)
        if token in self._stop_token_ids:
            self.finish_reason = FinishReason.STOP
            return self.text.finish(Piece(token))
        piece = self.text.push(token)
        if len(self._tokens) == self._end:
            self.finish_reason = FinishReason.LENGTH
        elif repeats and len(self._tokens) >= self._may_stop:
            self.finish_reason = FinishReason.REPETITION
        if self.finish_reason is not None:
            piece = self.text.finish(piece)
        if self.text.stopped_by is not None:
            self.finish_reason = FinishReason.STOP
        return piece
