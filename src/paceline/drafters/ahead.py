"""Drafts the next block while the target verifies this one.

For a drafter that takes time and does not need the target's device: a model on another one, or on
cores that are free. It is asked for what follows the whole block, the target's own pick behind it
included. Where the block stood and the pick was the one guessed, the next draft is there already;
where not, it is thrown away. The idea is Mirror-SD's (Bhendawade et al. 2025, arXiv 2510.13161).

Which tokens are tried may depend on what was ready in time; which stand never does.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from paceline.decoding.types import ComputedBlock, Drafter, Proposal


@dataclass(frozen=True, slots=True)
class _Job:
    """A draft that is made on an assumption."""

    start: int
    """Tokens of context before the block's draft."""
    draft: tuple[int, ...]
    """The block's draft: assumed to stand."""
    next: Future[Proposal]
    """What follows it."""

    def rest(self, context: Sequence[int]) -> Proposal | None:
        """What is left of the next draft when `context` has come, if it came as assumed."""
        behind = self.start + len(self.draft)
        if len(context) <= behind or tuple(context[self.start : behind]) != self.draft:
            return None
        proposal, came = self.next.result(), context[behind:]
        if list(proposal.tokens[: len(came)]) != list(came):
            return None
        return proposal._replace(
            tokens=proposal.tokens[len(came) :],
            probabilities=proposal.probabilities[len(came) :],
            match=proposal.match + len(came),
        )


class AheadDrafter(Drafter):
    """A drafter that is asked in time."""

    def __init__(self, inner: Drafter, worker: Executor) -> None:
        """Ask `inner`, and nobody else may, in the one thread of `worker`.

        Raises:
            ValueError: it looks at what the target computes, which is not there in time.
        """
        if inner.reads_logits:
            raise ValueError(f"{inner.name} looks at what the target computes")
        self.name = inner.name
        self._inner, self._worker = inner, worker
        self._job: _Job | None = None
        self._limit = 1
        self._came = False
        self.used = 0
        """Drafts that were there in time."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """What was drafted ahead, if that is what came; else what is drafted now."""
        self._limit = limit
        job, self._job = self._job, None
        ready = None if job is None else job.rest(context)
        if ready is not None and ready.tokens:
            self.used += 1
            return ready.cut(limit)
        return self._worker.submit(self._inner.propose, list(context), limit).result()

    def before_verify(self, context: Sequence[int], draft: Sequence[int]) -> None:
        """Begin with what may follow, unless the last such draft is still being made."""
        if self._job is not None and not self._job.next.done():
            return
        assumed = [*context, *draft]
        # One more than is verified at once: the first is what the target is to pick itself.
        following = self._worker.submit(self._inner.propose, assumed, self._limit + 1)
        self._job = _Job(len(context), tuple(draft), following)
        self._came = False

    def observe(self, computed: ComputedBlock) -> None:
        """Pass it on, in its turn."""
        self._came = computed.kept == len(computed.tokens)
        self._worker.submit(self._inner.observe, computed)

    def cost(self, limit: int) -> float:
        """Nothing where a draft is likely to be there."""
        job = self._job
        ready = self._came and job is not None and job.next.done()
        return 0.0 if ready else self._inner.cost(limit)

    def close(self) -> None:
        """Wait for what is being drafted, and give back what is held."""
        self._job = None
        self._worker.submit(self._inner.close).result()
