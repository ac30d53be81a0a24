"""The drafter `mtp` of one request."""

from collections.abc import Sequence

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock
from paceline_mlx.heads.cache import ChainCache
from paceline_mlx.heads.drafter import HeadDrafter
from paceline_mlx.heads.mtp.network import ChainNetwork

LONGEST_CHAIN = 8
"""Most tokens of a chain without the option `length`."""

MIN_CHANCE = 0.15
"""A chain ends where all its drafts are right with less than this probability by the head's own
estimate: one more row of the target costs about a tenth of a call."""


class MtpDrafter(HeadDrafter):
    """Drafts a chain, one token a step, of at most `length` tokens."""

    name = "mtp"
    _network: ChainNetwork
    _cache: ChainCache

    def __init__(
        self,
        network: ChainNetwork,
        cache: ChainCache,
        sampling: Sampling,
        prompt_length: int,
        length: int = LONGEST_CHAIN,
    ) -> None:
        """See `HeadDrafter`."""
        super().__init__(network, cache, sampling, prompt_length)
        self._length = length

    def drafts(self, context: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[float]]:
        """A chain after the last token.

        Empty unless the hidden state of the token before the last one was observed.
        """
        cache = self._cache
        if not self._ends_at(len(context) - 1):
            return (), ()
        cache.complete(context[-1])
        rows = cache.take_pending()
        assert rows is not None
        return self._network.draft(
            cache,
            rows,
            min(limit, self._length),
            MIN_CHANCE,
            sampler=self._sampler.following(context),
        )

    def observe(self, computed: ComputedBlock) -> None:
        """Keep hidden states, and the tokens after them."""
        if not (computed.taps and computed.accepted_rows):
            return
        if self._ends_at(computed.start):
            self._cache.complete(computed.tokens[0])
        super().observe(computed)
        self._cache.following += computed.tokens[1 : computed.accepted_rows]

    def _ends_at(self, position: int) -> bool:
        """Whether the pending rows end right before this position."""
        cache = self._cache
        return bool(cache.pending) and cache.pending_start + cache.pending_count == position
