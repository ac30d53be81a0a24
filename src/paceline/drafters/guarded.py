"""Isolates a drafter's failures from its request and from the other requests of the batch.

For a server, whose clients choose drafters. A drafter that raises or takes too long abstains for
the rest of its request, and the fault is reported. The answer's tokens stay the same.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from paceline.decoding.types import ComputedBlock, Drafter, Proposal

Fault = Callable[[str, Exception], None]
"""Called with the drafter's name and the exception when a drafter is disabled."""

_SECONDS = 1.0
"""Time limit of a call to a drafter."""

_T = TypeVar("_T")


class TooSlow(Exception):
    """A call to a drafter exceeded its time limit."""


class GuardedDrafter(Drafter):
    """Passes calls to `inner` until it fails, and abstains afterwards."""

    def __init__(self, inner: Drafter, fault: Fault, *, seconds: float = _SECONDS) -> None:
        """Guard a drafter of one request.

        Args:
            inner: the drafter.
            fault: called once, when `inner` is disabled.
            seconds: time limit of a call; the result of the first call over it is still used.
        """
        self.name = inner.name
        self.disabled = False
        """True if `inner` has failed: its state for the sequence may be wrong."""
        self._inner, self._seconds, self._fault = inner, seconds, fault

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        return self._guard(lambda: self._inner.propose(context, limit), Proposal((), self.name))

    def before_verify(self, context: Sequence[int], draft: Sequence[int]) -> None:
        self._guard(lambda: self._inner.before_verify(context, draft), None)

    def observe(self, computed: ComputedBlock) -> None:
        self._guard(lambda: self._inner.observe(computed), None)

    def cost(self, limit: int) -> float:
        return self._guard(lambda: self._inner.cost(limit), 0.0)

    def close(self) -> None:
        try:
            self._inner.close()
        except Exception as error:
            self._silence(error)

    def _guard(self, call: Callable[[], _T], otherwise: _T) -> _T:
        if self.disabled:
            return otherwise
        started = perf_counter()
        try:
            value = call()
        except Exception as error:
            self._silence(error)
            return otherwise
        if (took := perf_counter() - started) > self._seconds:
            self._silence(TooSlow(f"took {took:.1f} s; {self._seconds} s are allowed"))
        return value

    def _silence(self, error: Exception) -> None:
        if not self.disabled:
            self.disabled = True
            self._fault(self.name, error)
