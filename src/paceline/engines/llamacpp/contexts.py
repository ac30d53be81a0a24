"""The contexts of a model: few, each lent to the sequence that runs, grown as the sequence grows.

    sequence A  ->  context of 512 slots       runs
    sequence B  ->  state, 3 MB                parked: ran longest ago when C needed a context
    sequence C  ->  context of 1,024 slots     was of 512, until it had 500 tokens

A context's slots are allocated and zeroed when it is made, so it begins small and doubles; the copy
costs as much as reading the keys and values once. Invariant: a sequence's keys and values are in
one place, and moving them changes no bit.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from paceline.engines.llamacpp.binding import (
    LEAST_CONTEXT,
    ContextSettings,
    NativeContext,
    NativeModel,
    State,
)

_FIRST_SLOTS = 2 * LEAST_CONTEXT
_MOST_SPARE = 2
"""Contexts kept without a sequence, for the next one."""


class Parked(NamedTuple):
    """A waiting sequence."""

    state: State
    length: int
    """Slots of the state that belong to the sequence; it may hold more."""


class Contexts:
    """Lends contexts to sequences; see the top of this file."""

    def __init__(
        self, model: NativeModel, context_length: int, rows: int, threads: int, most: int
    ) -> None:
        """Make none yet.

        Args:
            model: the model that they share.
            context_length: most slots of a sequence.
            rows: most rows of a call.
            threads: CPU threads of a call.
            most: contexts that may exist at once.
        """
        self._model, self._rows, self._threads = model, rows, threads
        self._longest = whole(context_length + rows)
        self._most = most
        self._lent: OrderedDict[Hashable, NativeContext] = OrderedDict()  # least recent first
        self._parked: dict[Hashable, Parked] = {}
        self._spare: list[NativeContext] = []

    def of(self, sequence: Hashable, length: int, end: int) -> NativeContext:
        """The context of a sequence, holding its first `length` slots, with room up to `end`."""
        context = self._lent.get(sequence)
        if context is not None and context.settings.slots < end:
            self._park(sequence)
            context = None
        if context is None:
            context = self._lend(sequence, end)
        self._lent.move_to_end(sequence)
        if context.length > length:
            context.truncate(length)
        return context

    def make_room(self, sequences: int) -> None:
        """Allow as many contexts as a call has sequences: none of them is parked during it."""
        self._most = max(self._most, sequences)

    def copy(self, sequence: Hashable, other: Hashable, length: int, shared: int) -> None:
        """Give `other` the first `shared` of a sequence's `length` slots."""
        parked = self._parked.get(sequence)
        if parked is None:
            context = self.of(sequence, length, length)
            parked = Parked(context.state(), shared)
        self._parked[other] = parked._replace(length=shared)

    def forget(self, sequence: Hashable) -> None:
        """Drop a sequence's keys and values."""
        self._parked.pop(sequence, None)
        context = self._lent.pop(sequence, None)
        if context is not None:
            self._give_back(context)

    def close(self) -> None:
        """Free all contexts."""
        for context in (*self._lent.values(), *self._spare):
            context.close()
        self._lent.clear()
        self._parked.clear()
        self._spare.clear()

    def _lend(self, sequence: Hashable, end: int) -> NativeContext:
        while len(self._lent) >= self._most:
            self._park(next(iter(self._lent)))
        slots = _FIRST_SLOTS
        while slots < end:
            slots *= 2
        context = self._take(min(slots, self._longest))
        parked = self._parked.pop(sequence, None)
        self._lent[sequence] = context
        if parked is not None:
            context.restore(parked.state, parked.length)
        return context

    def _take(self, slots: int) -> NativeContext:
        """A spare context of at least `slots` slots, else a new one."""
        fitting = [context for context in self._spare if context.settings.slots >= slots]
        if fitting:
            context = min(fitting, key=lambda context: context.settings.slots)
            self._spare.remove(context)
            return context
        return self._model.context(ContextSettings(slots, self._rows, self._threads))

    def _park(self, sequence: Hashable) -> None:
        context = self._lent.pop(sequence)
        if context.length:
            self._parked[sequence] = Parked(context.state(), context.length)
        self._give_back(context)

    def _give_back(self, context: NativeContext) -> None:
        if len(self._spare) < _MOST_SPARE:
            context.truncate(0)
            self._spare.append(context)
        else:
            context.close()


def whole(slots: int) -> int:
    """Slots of a context that has at least `slots`."""
    return -(-slots // LEAST_CONTEXT) * LEAST_CONTEXT
