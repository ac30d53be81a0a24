"""Per-request drafters: they observe hidden states and run their network once per step."""

from collections.abc import Sequence

from paceline.decoding.types import ComputedBlock
from paceline.drafters.heads import MIN_CHANCE, HeadDrafter
from paceline_mlx.heads.cache import PREFILL_CHUNK, ChainCache, HeadCache


class MlxDrafter(HeadDrafter):
    _cache: HeadCache

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


class DFlashDrafter(MlxDrafter):
    def drafts(self, context: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[float]]:
        cache = self._cache
        if not (cache.pending or len(cache)):
            return (), ()
        rows = cache.take_pending()
        self._sampler.follow(context)
        drafted: tuple[Sequence[int], Sequence[float]] = self._network.draft(
            cache, context[-1], len(context) - 1, rows, sampler=self._sampler
        )
        return drafted


class MtpDrafter(MlxDrafter):
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
        self._sampler.follow(context)
        drafted: tuple[Sequence[int], Sequence[float]] = self._network.draft(
            cache, rows, min(limit, self._network.length), MIN_CHANCE, sampler=self._sampler
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
