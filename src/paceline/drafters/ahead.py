"""Drafts the next block while the target verifies this one.

For a costly drafter that does not need the target's device: a model on another device or on free
cores. It drafts what follows the whole block, the bonus token included. If the target accepts the
block and picks the drafted bonus token, the next draft is ready; otherwise it is dropped. The idea
is Mirror-SD's (Bhendawade et al. 2025, arXiv 2510.13161).

Which tokens are drafted may depend on timing; which are accepted never does.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from paceline.decoding.types import ComputedBlock, Drafter, Proposal


@dataclass(frozen=True, slots=True)
class _DraftAhead:
    """A draft that assumes that the block before it is accepted."""

    start: int
    """Tokens of context before the assumed draft."""
    draft: tuple[int, ...]
    """The draft under verification, assumed to be accepted."""
    next: Future[tuple[Proposal, float, float]]
    """The proposal that follows it, and when it was made, in seconds of `perf_counter`."""

    def rest(self, context: Sequence[int]) -> Proposal | None:
        """Return the part of the next proposal after `context`, or None if the guess failed."""
        asked = perf_counter()
        end = self.start + len(self.draft)
        if len(context) <= end or tuple(context[self.start : end]) != self.draft:
            return None
        proposal, began, ended = self.next.result()
        new = context[end:]
        if list(proposal.tokens[: len(new)]) != list(new):
            return None
        return proposal._replace(
            tokens=proposal.tokens[len(new) :],
            probabilities=proposal.probabilities[len(new) :],
            match=proposal.match + len(new),
            hidden=max(min(ended, asked) - began, 0.0),
        )


class AheadDrafter(Drafter):
    """Runs a drafter in a worker thread, one block ahead."""

    def __init__(self, inner: Drafter, worker: Executor) -> None:
        """Run `inner`, which must have no other user, in the single thread of `worker`."""
        self.name = inner.name
        self._inner, self._worker = inner, worker
        self._ahead: _DraftAhead | None = None
        self._limit = 1
        self._accepted = False
        self.used = 0

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        self._limit = limit
        ahead, self._ahead = self._ahead, None
        ready = None if ahead is None else ahead.rest(context)
        if ready is not None and ready.tokens:
            self.used += 1
            return ready.cut(limit)
        return self._worker.submit(self._inner.propose, list(context), limit).result()

    def before_verify(self, context: Sequence[int], draft: Sequence[int]) -> None:
        if self._ahead is not None and not self._ahead.next.done():
            return
        assumed = [*context, *draft]
        # One more token than is verified: the first is the drafted bonus token.
        proposal = self._worker.submit(self._timed, assumed, self._limit + 1)
        self._ahead = _DraftAhead(len(context), tuple(draft), proposal)
        self._accepted = False

    def observe(self, computed: ComputedBlock) -> None:
        self._accepted = computed.accepted_rows == len(computed.tokens)
        # The rows are engine memory, or on a device that another thread cannot read.
        taps = {name: np.array(computed.taps[name]) for name in computed.taps}
        self._worker.submit(self._inner.observe, replace(computed, taps=taps))

    def _timed(self, context: Sequence[int], limit: int) -> tuple[Proposal, float, float]:
        began = perf_counter()
        return self._inner.propose(context, limit), began, perf_counter()

    def cost(self, limit: int) -> float:
        ahead = self._ahead
        ready = self._accepted and ahead is not None and ahead.next.done()
        return 0.0 if ready else self._inner.cost(limit)

    def close(self) -> None:
        self._ahead = None
        self._worker.submit(self._inner.close).result()
