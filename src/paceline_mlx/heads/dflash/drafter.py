"""The DFlash drafter of one request. All requests to a target share its network."""

from collections.abc import Sequence

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, Drafter, Proposal
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.context import PREFILL_CHUNK, ContextCache
from paceline_mlx.heads.dflash.network import Network


class DFlashDrafter(Drafter):
    """Drafts a block in one pass, for one request."""

    name = "dflash"

    def __init__(
        self,
        network: Network,
        cache: ContextCache,
        sampling: Sampling,
        prompt_length: int,
    ) -> None:
        """Draft with `network`, as `sampling` picks after a prompt.

        `cache` may have earlier tokens of the sequence.
        """
        self._network = network
        self._cache = cache
        vocab_size = network.config.vocab_size
        self._sampler = DraftSampler(sampling, prompt_length, vocab_size)
        self._drafted_at = -1
        """Length of the context that `_block` was drafted for."""
        self._block = Proposal((), self.name)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The draft after the last token; empty before the first hidden states were observed."""
        cache = self._cache
        if not (cache.pending or len(cache)):
            return Proposal((), self.name)
        if self._drafted_at != len(context):
            tapped = self._network.concat(cache.pending)
            cache.pending = []
            tokens, chances = self._network.draft(
                cache,
                context[-1],
                len(context) - 1,
                tapped,
                cache.pending_start,
                sampler=self._sampler.following(context),
            )
            self._block = Proposal(tokens, self.name, 0, chances)
            self._drafted_at = len(context)
        return self._block.cut(limit)

    def observe(self, computed: ComputedBlock) -> None:
        """Keep the tapped hidden states of the rows that are now part of the sequence."""
        if not computed.taps or not computed.kept:
            return
        cache = self._cache
        count = cache.pending_count
        # Pending rows are contiguous, and few: a long prompt is prefilled as it comes.
        if count > PREFILL_CHUNK or (count and cache.pending_start + count != computed.start):
            self._network.prefill(cache, self._network.concat(cache.pending), cache.pending_start)
            cache.pending = []
        if not cache.pending:
            cache.pending_start = computed.start
        cache.pending.append(self._network.tapped(computed.taps, computed.kept))

    def cost(self, limit: int) -> float:
        """Seconds of a forward pass at this context; `limit` does not change it."""
        return self._network.cost(len(self._cache) + self._cache.pending_count)
