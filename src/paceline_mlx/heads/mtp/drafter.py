"""The drafter `mtp` of one request. All requests to a target share its head."""

from collections.abc import Sequence

import mlx.core as mx

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, Drafter, Proposal
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.context import PREFILL_CHUNK
from paceline_mlx.heads.mtp.cache import HeadCache, Rows
from paceline_mlx.heads.mtp.network import HeadNetwork

LONGEST_CHAIN = 8
"""Most tokens of a chain without the option `length`."""

LEAST_CHANCE = 0.15
"""A chain ends where all its drafts are right with less than this probability by the head's own
estimate: one more row of the target costs about a tenth of a call."""

_LENGTH_WEIGHT = 0.2
"""Weight of the newest chain in the mean length of chains."""


class MtpDrafter(Drafter):
    """Drafts a chain, one token a step, for one request."""

    name = "mtp"

    def __init__(
        self,
        head: HeadNetwork,
        cache: HeadCache,
        sampling: Sampling,
        prompt_length: int,
        length: int = LONGEST_CHAIN,
    ) -> None:
        """Draft with `head` at most `length` tokens, as `sampling` picks after a prompt.

        `cache` may have earlier tokens.
        """
        self._head = head
        self._sampler = DraftSampler(sampling, prompt_length, head.config.vocab_size)
        self._cache = cache
        self._length = length
        self._mean = 1.0
        """Running mean of the drafts of a chain."""
        self._drafted_at = -1
        """Length of the context that `_chain` was drafted for."""
        self._chain = Proposal((), self.name)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The draft after the last token.

        Empty unless the hidden state of the token before the last one was observed.
        """
        if self._drafted_at != len(context):
            self._drafted_at = len(context)
            self._chain = Proposal((), self.name)
            cache = self._cache
            if cache.pending and cache.pending_start + cache.pending_count == len(context) - 1:
                self._complete(context[-1])
                drafts, chances = self._head.draft(
                    cache,
                    self._take_pending(),
                    min(limit, self._length),
                    LEAST_CHANCE,
                    sampler=self._sampler.following(context),
                )
                self._chain = Proposal(drafts, self.name, 0, chances)
                self._mean += _LENGTH_WEIGHT * (len(drafts) - self._mean)
        return self._chain.cut(limit)

    def observe(self, computed: ComputedBlock) -> None:
        """Keep the hidden states of the rows that are now part of the sequence."""
        if not (computed.taps and computed.kept):
            return
        cache = self._cache
        count = cache.pending_count
        follows = cache.pending_start + count == computed.start
        if count and follows:
            self._complete(computed.tokens[0])
        # Pending rows are contiguous, and few: a long prompt is prefilled as it comes.
        if count > PREFILL_CHUNK or (count and not follows):
            rows = self._take_pending()
            if token_count := len(rows.tokens):
                self._head.prefill(cache, rows._replace(tapped=rows.tapped[:token_count]))
        if not cache.pending:
            cache.pending_start = computed.start
        cache.pending.append(self._head.tapped(computed.taps, computed.kept))
        cache.following += computed.tokens[1 : computed.kept]

    def cost(self, limit: int) -> float:
        """Seconds of a chain of up to `limit` tokens, of the mean length so far, at this context.

        Reading the tokens since the last chain is part of it, but not reading a prompt: that is
        done once.
        """
        pending = self._cache.pending_count
        drafts = min(max(self._mean, 1.0), limit, self._length)
        unread = max(pending, 1) if self._drafted_at >= 0 else 1
        return self._head.cost(len(self._cache) + pending, drafts, unread)

    def _complete(self, token: int) -> None:
        """The last pending row is followed by `token`."""
        if len(self._cache.following) < self._cache.pending_count:
            self._cache.following.append(token)

    def _take_pending(self) -> Rows:
        """The pending rows, of which none are left then; the last one may lack its token."""
        cache = self._cache
        rows = Rows(mx.concatenate(cache.pending), cache.following, cache.pending_start)
        cache.pending, cache.following = [], []
        return rows
