"""Per-request drafters: they observe hidden states and run their network once per step."""

from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, DeferredRows, Drafter, Proposal
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.cache import PREFILL_CHUNK, ChainCache, HeadCache

MIN_CHANCE = 0.15
"""A chain ends when the head's own estimate that all its drafts are right falls below this
probability: one more row in the target's forward pass costs about a tenth of the pass."""


class HeadDrafter(Drafter):
    """A drafter for one request. All requests to a target share the network."""

    def __init__(
        self, network: Any, cache: HeadCache, sampling: Sampling, prompt_length: int
    ) -> None:
        """Draft with `network`; `sampling` picks the tokens after the prompt.

        `cache` may already contain tokens of the sequence.
        """
        self._network, self._cache = network, cache
        self._sampler = DraftSampler(sampling, prompt_length, network.config.vocab_size)
        self._drafted_at = -1
        """Context length for which `_draft` was made."""
        self._draft = Proposal((), self.name)

    @abstractmethod
    def drafts(self, context: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return tokens after `context` and their probabilities, from the cache's hidden states."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        if self._drafted_at != len(context):
            self._drafted_at = len(context)
            started, read = perf_counter(), self._cache.pending_count
            tokens, chances = self.drafts(context, limit)
            if isinstance(chances, DeferredRows):
                chances = self._timed(chances, started, read)
            elif tokens:
                self._network.cost.observe(perf_counter() - started, read)
            self._draft = Proposal(tokens, self.name, 0, chances)
        return self._draft.cut(limit)

    def cost(self, limit: int) -> float:
        return float(self._network.cost.seconds)

    def observe(self, computed: ComputedBlock) -> None:
        if not computed.taps or not computed.accepted_rows:
            return
        cache, count = self._cache, self._cache.pending_count
        # Pending rows are contiguous and few: a long prompt is prefilled chunk by chunk.
        if count > PREFILL_CHUNK or (count and cache.pending_start + count != computed.start):
            rows = cache.take_pending()
            if rows is not None:
                self._network.prefill(cache, rows)
        if not cache.pending:
            cache.pending_start = computed.start
        cache.pending.append(self._network.tapped(computed.taps, computed.accepted_rows))

    def _timed(
        self, chances: DeferredRows[float], started: float, rows: int
    ) -> DeferredRows[float]:
        """Wrap probabilities that `auto` reads before verification, to time the read."""

        def read() -> Sequence[float]:
            values = list(chances)
            self._network.cost.observe(perf_counter() - started, rows)
            return values

        return DeferredRows(read, len(chances))


class DFlashDrafter(HeadDrafter):
    name = "dflash"

    def drafts(self, context: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[float]]:
        cache = self._cache
        if not (cache.pending or len(cache)):
            return (), ()
        rows = cache.take_pending()
        sampler = self._sampler.following(context)
        drafted: tuple[Sequence[int], Sequence[float]] = self._network.draft(
            cache, context[-1], len(context) - 1, rows, sampler=sampler
        )
        return drafted


class MtpDrafter(HeadDrafter):
    name = "mtp"
    _cache: ChainCache

    def drafts(self, context: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return a chain after the last token.

        It is empty unless the hidden state of the second-to-last token was observed.
        """
        cache = self._cache
        if not self._ends_at(len(context) - 1):
            return (), ()
        cache.complete(context[-1])
        rows = cache.take_pending()
        assert rows is not None
        sampler, count = self._sampler.following(context), min(limit, self._network.length)
        drafted: tuple[Sequence[int], Sequence[float]] = self._network.draft(
            cache, rows, count, MIN_CHANCE, sampler=sampler
        )
        return drafted

    def observe(self, computed: ComputedBlock) -> None:
        if not (computed.taps and computed.accepted_rows):
            return
        if self._ends_at(computed.start):
            self._cache.complete(computed.tokens[0])
        super().observe(computed)
        self._cache.following += computed.tokens[1 : computed.accepted_rows]

    def _ends_at(self, position: int) -> bool:
        cache = self._cache
        return bool(cache.pending) and cache.pending_start + cache.pending_count == position
