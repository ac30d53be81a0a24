"""Drafts with a smaller model of the same vocabulary, token by token.

Its KV follows the text: rejected tokens are rolled back, accepted ones are already there. A draft
ends when its acceptance is too unlikely to justify another forward pass of the draft model.

A long text is prefilled one chunk per step, and the drafter abstains if its KV cache is full, so
that it never holds up the target or the other requests of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.decoding.costs import CostTable
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Block, Drafter, Logits, Proposal, common_prefix_length
from paceline.drafters.draft_sampling import DraftSampler
from paceline.errors import CacheFull

_LENGTH_WEIGHT = 0.25
"""Weight of the newest draft in the mean draft length."""

_PREFILL_CHUNK = 512
_MAX_DECODE_ROWS = 8
"""Up to this many new tokens run as decode rows, which is faster than prefill."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """An open draft model; one serves all requests."""

    engine: Any
    """`engines.base.Engine`, which drafters do not import."""
    cost: CostTable
    """Measured seconds of its forward passes."""
    min_probability: float
    """A draft grows while P(all of it is accepted) is at least this: the draft model's forward-pass
    cost divided by the target's."""
    slots: int = 0
    """Slots of its KV cache, shared by all requests."""


class ModelDrafter(Drafter):
    name = "model"

    def __init__(
        self, model: DraftModel, sampling: Sampling | None = None, prompt_length: int = 0
    ) -> None:
        """Draft with `model` and pick as `sampling` does; `close` frees its slots."""
        self._model = model
        self._sampler = DraftSampler(sampling or Sampling(), prompt_length, model.engine.vocab_size)
        self._sequence = model.engine.open()
        self._held: list[int] = []  # tokens whose KV the sequence holds
        self._length = 1.0  # running mean of tokens per draft
        self._prefilling = False  # True while its KV does not reach the end of the text

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        # Each draft token but the last takes a slot.
        limit = min(limit, self._model.engine.context_length - len(context))
        if not context or limit < 1:
            return Proposal((), self.name)
        tokens: list[int] = []
        probabilities: list[float] = []
        all_accepted = 1.0
        self._sampler.follow(context)
        try:
            logits = self._catch_up(context)
            while logits is not None:
                token, probability = self._sampler.pick(logits, len(context) + len(tokens))
                all_accepted *= probability
                tokens.append(token)
                probabilities.append(probability)
                if len(tokens) == limit or all_accepted < self._model.min_probability:
                    break
                logits = self._run([token])
        except CacheFull:
            # Free the slots for other requests: this one cannot use them now.
            self._sequence.rewind(0)
            self._held = []
        if not tokens:
            return Proposal((), self.name)
        self._length += _LENGTH_WEIGHT * (len(tokens) - self._length)
        return Proposal(tokens, self.name, 0, probabilities)

    def cost(self, limit: int) -> float:
        """Return the seconds of one forward pass per token of a draft of mean length.

        Returns 0.0 while a long text is prefilled, which has to be done in any case.
        """
        if self._prefilling:
            return 0.0
        return self._model.cost.at_context(len(self._held))(1) * min(limit, self._length)

    def close(self) -> None:
        self._sequence.close()

    def _catch_up(self, context: Sequence[int]) -> Logits | None:
        """Extend the KV by at most a chunk towards the end of `context`; return the last logits.

        Returns None if the end was not reached: the next step continues from there.
        """
        held = common_prefix_length(self._held[: len(context) - 1], context)
        self._sequence.rewind(held)
        held = self._sequence.length
        del self._held[held:]
        row = self._run(context[held : held + _PREFILL_CHUNK])
        self._prefilling = len(self._held) < len(context)
        return None if self._prefilling else row

    def _run(self, tokens: Sequence[int]) -> Logits:
        block = Block(tokens, 1, prefill=len(tokens) > _MAX_DECODE_ROWS)
        result = self._model.engine.step([(self._sequence, block)])
        self._sequence.commit(len(tokens))
        self._held += tokens
        row: Logits = result.logits[0][0]
        return row
