"""The contexts of a model: few, lent to the sequences that run, grown as a sequence grows.

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
    State,
)
from paceline.engines.llamacpp.native import NativeContext, NativeModel

_FIRST_SLOTS = 2 * LEAST_CONTEXT
_MOST_SPARE = 2
"""Contexts kept without a sequence, for the next one."""


class Parked(NamedTuple):
    """A waiting sequence."""

    state: State
    held: int
    """Slots of the state: a context needs as many to take it."""
    length: int
    """Those that belong to the sequence; a fork's state is that of the whole sequence before it."""
    recurrent: State | None = None
    """State of the recurrent layers after `length` slots, if the state holds more."""


class Contexts:
    """Lends contexts to sequences; see the top of this file."""

    def __init__(
        self,
        model: NativeModel,
        context_length: int,
        settings: ContextSettings,
        *,
        most: int,
        most_slots: int,
    ) -> None:
        """Make none yet.

        Args:
            model: the model that they share.
            context_length: most slots of a sequence.
            settings: of every context, but for its slots.
            most: contexts that may exist at once.
            most_slots: slots of all contexts beyond which none is kept without a sequence.
        """
        self._model, self._settings = model, settings
        self._longest = whole(context_length + settings.rows)
        self._most, self._most_slots = most, most_slots
        self._lent: OrderedDict[Hashable, NativeContext] = OrderedDict()  # least recent first
        self._parked: dict[Hashable, Parked] = {}
        self._spare: list[NativeContext] = []

    def lent_to(self, sequence: Hashable) -> bool:
        """Whether a sequence has a context."""
        return sequence in self._lent

    def of(self, sequence: Hashable, end: int) -> NativeContext:
        """The context of a sequence, as it was left, with room up to slot `end`."""
        context = self._lent.get(sequence)
        if context is not None and context.settings.slots < end:
            self._park(sequence)
            context = None
        if context is None:
            context = self._lend(sequence, end)
        self._lent.move_to_end(sequence)
        return context

    def shorten(self, sequence: Hashable, length: int) -> None:
        """Drop a sequence's slots from `length` on, if they are in a context that can do so."""
        context = self._lent.get(sequence)
        if context is not None and context.length > length and context.can_truncate(length):
            context.truncate(length)

    def copy(
        self, sequence: Hashable, other: Hashable, shared: int, recurrent: State | None = None
    ) -> None:
        """Give `other` the first `shared` slots of a sequence.

        `recurrent` is the state of the recurrent layers after them, if there are such layers.
        """
        parked = self._parked.get(sequence) or _parked(self.of(sequence, shared))
        self._parked[other] = parked._replace(length=shared, recurrent=recurrent)

    def forget(self, sequence: Hashable) -> None:
        """Drop a sequence's keys and values."""
        self._parked.pop(sequence, None)
        context = self._lent.pop(sequence, None)
        if context is not None:
            self._give_back(context)

    def rest(self) -> None:
        """Park every sequence; contexts beyond the spare ones are freed."""
        while self._lent:
            self._park(next(iter(self._lent)))

    def close(self) -> None:
        """Free all contexts."""
        for context in (*self._lent.values(), *self._spare):
            context.close()
        self._lent.clear()
        self._parked.clear()
        self._spare.clear()

    @property
    def _slots(self) -> int:
        """Slots of all contexts."""
        return sum(context.settings.slots for context in (*self._lent.values(), *self._spare))

    def _lend(self, sequence: Hashable, end: int) -> NativeContext:
        binding = self._model.binding
        while self._lent and (len(self._lent) >= self._most or binding.is_full):
            self._park(next(iter(self._lent)))
        parked = self._parked.get(sequence)
        slots = _FIRST_SLOTS
        while slots < max(end, parked.held if parked else 0):
            slots *= 2
        self._lent[sequence] = context = self._take(min(slots, self._longest))
        if parked is not None:
            del self._parked[sequence]
            context.restore(parked.state, parked.length, parked.recurrent)
        return context

    def _take(self, slots: int) -> NativeContext:
        """A spare context of at least `slots` slots, else a new one."""
        # One that is far larger is left to a sequence that needs it, or in time all would be large.
        fitting = [
            context for context in self._spare if slots <= context.settings.slots <= 2 * slots
        ]
        if fitting:
            context = min(fitting, key=lambda context: context.settings.slots)
            self._spare.remove(context)
            return context
        while self._spare and (
            self._model.binding.is_full
            or len(self._lent) + len(self._spare) >= self._most
            or self._slots + slots > self._most_slots
        ):
            self._spare.pop(0).close()
        return self._model.context(self._settings._replace(slots=slots))

    def _park(self, sequence: Hashable) -> None:
        context = self._lent.pop(sequence)
        if context.length:
            self._parked[sequence] = _parked(context)
        self._give_back(context)

    def _give_back(self, context: NativeContext) -> None:
        fits = self._slots + context.settings.slots <= self._most_slots
        if fits and len(self._spare) < _MOST_SPARE and not self._model.binding.is_full:
            context.truncate(0)
            self._spare.append(context)
        else:
            context.close()


def _parked(context: NativeContext) -> Parked:
    state = context.state()
    return Parked(state, context.length, context.length)


def whole(slots: int) -> int:
    """Slots of a context that has at least `slots`."""
    return -(-slots // LEAST_CONTEXT) * LEAST_CONTEXT
