"""A drafter's KV cache for one sequence, and the hidden states that are not in it yet.

Observed hidden states wait in `pending` until a draft needs them: a response that is drafted from
text alone does not pay for the network. A long prompt is added in pieces as it arrives.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, Drafter, Logits, tap_name
from paceline.drafters.draft_sampling import DraftSampler
from paceline.drafters.heads import DraftCost, HeadDrafter
from paceline.drafters.native.file import DraftFile

_MAX_PENDING = 512
"""Maximum pending rows."""


class DraftCache:
    """A `HeadCache` of a native drafter; see the top of this file.

    A row may be one position after its state (`shift`; see `chain.py`).
    """

    def __init__(self, context: Any, shift: int = 0) -> None:
        """Wrap an empty `DraftContext` (engines/llamacpp/draft_context.py)."""
        self.context, self.shift = context, shift
        self.pending: list[Logits] = []
        """[n, taps * d] each: hidden states of positions starting at `start`."""
        self.following: list[int] = []
        """The tokens after them; the last one may not be known yet."""
        self.start = 0
        self.first = 0
        """The token at `start`."""

    @property
    def pending_count(self) -> int:
        return sum(map(len, self.pending))

    @property
    def end(self) -> int:
        """The position after the last observed one; 0: none was observed."""
        if self.pending:
            return self.start + self.pending_count
        length: int = self.context.length
        return max(length - self.shift, 0)

    def observe(self, states: Logits, tokens: Sequence[int], start: int) -> None:
        if self.pending and start != self.end:  # a gap: drafts begin again after it
            self.pending, self.following = [], []
        if not self.pending:
            self.start, self.first = start, tokens[0]
        elif len(self.following) < self.end - self.start:
            self.following.append(tokens[0])
        self.pending.append(states)
        self.following += tokens[1:]

    def take(self) -> tuple[Logits, list[int]]:
        """Remove and return the pending states [n, taps * d] and the tokens after them."""
        states, following = np.concatenate(self.pending), self.following
        self.pending, self.following = [], []
        return states, following

    def copy(self, position: int) -> Self:
        other = type(self)(self.context.copy(position), self.shift)
        other.pending, other.following = [*self.pending], [*self.following]
        other.start, other.first = self.start, self.first
        other.truncate(position)
        return other

    def truncate(self, position: int) -> None:
        """Drop the tokens at this position and later.

        An earlier row that contains the token at this position stays: the state to replace it is
        gone. It is one of many rows that a draft reads, and drafts need not be right.
        """
        self.context.truncate(position)
        keep = max(position - self.start, 0)
        if self.pending:
            states = np.concatenate(self.pending)[:keep]
            self.pending = [states] if keep else []
        del self.following[max(keep - 1, 0) :]


class DraftNetwork(ABC):
    """A drafter's network, which fills a cache and drafts from it; an `OpenHead`."""

    name: str

    def __init__(self, file: DraftFile, model: Any) -> None:
        """Take an open drafter (`OpenDrafter`)."""
        self._file, self._model = file, model
        self.taps, self.vocab_size = file.taps, file.vocab_size
        self.may_skip = False
        """True if it can draft when only the states of the most recent tokens are unknown."""
        self.cost = DraftCost()

    def drafter(self, cache: DraftCache, sampling: Sampling, prompt_length: int) -> Drafter:
        return NativeDrafter(self, cache, sampling, prompt_length)

    @abstractmethod
    def new_cache(self) -> DraftCache:
        """Return an empty cache for a sequence."""

    @abstractmethod
    def fill(self, cache: DraftCache) -> None:
        """Move the pending states into the cache's context."""

    @abstractmethod
    def draft(
        self, cache: DraftCache, context: Sequence[int], limit: int, sampler: DraftSampler
    ) -> tuple[list[int], list[float]]:
        """Draft after a text whose tokens were all observed, except the last.

        Returns draft tokens and their probabilities.
        """


class NativeDrafter(HeadDrafter):
    _network: DraftNetwork
    _cache: DraftCache

    def drafts(self, context: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[float]]:
        known, last = self._cache.end, len(context) - 1
        if not (0 < known <= last and (known == last or self._network.may_skip)):
            return (), ()
        self._sampler.follow(context)
        return self._network.draft(self._cache, context, limit, self._sampler)

    def observe(self, computed: ComputedBlock) -> None:
        self._drafted_at = -1
        if computed.taps and computed.accepted_rows:
            rows = computed.accepted_rows
            layers = [computed.taps[tap_name(layer)][:rows] for layer in self._network.taps]
            states = np.concatenate(layers, axis=1)
            self._cache.observe(states, computed.tokens[:rows], computed.start)
            if self._cache.pending_count > _MAX_PENDING:
                self._network.fill(self._cache)
