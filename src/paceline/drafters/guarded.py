"""A drafter that cannot harm the request it drafts for, nor the requests in the same calls.

For a server, whose clients choose drafters and whose answers do not depend on them. A drafter that
raises, or takes too long, is silenced for the rest of its request, and that is counted. The answer
goes on without it, to the same tokens.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from paceline.decoding.types import ComputedBlock, Drafter, Proposal

Fault = Callable[[str, Exception], None]
"""Called with a drafter's name and what it raised when it is silenced."""

_SECONDS = 1.0
"""The most that a call of a drafter may take."""

_T = TypeVar("_T")


class TooSlow(Exception):
    """A drafter took longer than it may."""


class GuardedDrafter(Drafter):
    """`inner`, until it fails; an abstaining drafter from then on."""

    def __init__(self, inner: Drafter, fault: Fault, *, seconds: float = _SECONDS) -> None:
        """Guard a drafter of one request.

        Args:
            inner: the drafter.
            fault: called once, when it is silenced.
            seconds: the most that a call of it may take; the one that took longer still counts.
        """
        self.name = inner.name
        self.reads_logits = inner.reads_logits
        self.silenced = False
        """Whether it has failed: what it remembers of the sequence may be wrong."""
        self._inner, self._seconds, self._fault = inner, seconds, fault

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The inner drafter's proposal; nothing once it has failed."""
        return self._guard(lambda: self._inner.propose(context, limit), Proposal((), self.name))

    def before_verify(self, context: Sequence[int], draft: Sequence[int]) -> None:
        """See `Drafter.before_verify`."""
        self._guard(lambda: self._inner.before_verify(context, draft), None)

    def observe(self, computed: ComputedBlock) -> None:
        """See `Drafter.observe`."""
        self._guard(lambda: self._inner.observe(computed), None)

    def cost(self, limit: int) -> float:
        """See `Drafter.cost`."""
        return self._guard(lambda: self._inner.cost(limit), 0.0)

    def close(self) -> None:
        """Close the inner drafter, whether or not it has failed."""
        try:
            self._inner.close()
        except Exception as error:
            self._silence(error)

    def _guard(self, call: Callable[[], _T], otherwise: _T) -> _T:
        if self.silenced:
            return otherwise
        started = perf_counter()
        try:
            found = call()
        except Exception as error:
            self._silence(error)
            return otherwise
        if (took := perf_counter() - started) > self._seconds:
            self._silence(TooSlow(f"took {took:.1f} s; {self._seconds} s are allowed"))
        return found

    def _silence(self, error: Exception) -> None:
        if not self.silenced:
            self.silenced = True
            self._fault(self.name, error)
