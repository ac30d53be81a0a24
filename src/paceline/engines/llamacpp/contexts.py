"""The contexts of a model: few, lent to the sequences that run, grown as a sequence grows.

    sequence A  ->  context of 512 slots       runs
    sequence B  ->  state, 3 MB                parked: ran longest ago when C needed a context
    sequence C  ->  context of 1,024 slots     was of 512, until it had 500 tokens

A context's slots are allocated and zeroed when it is made, so it begins small and doubles; the copy
costs as much as reading the keys and values once. Where several sequences share calls, a context
has places for several, and a sequence takes one in the largest context: those that are together
share calls. Invariant: a sequence's keys and values are in one place, and moving them changes no
bit; so a failing call comes before or after a move.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from paceline.engines.llamacpp.binding import LEAST_CONTEXT, ContextSettings, State
from paceline.engines.llamacpp.native import NativeContext, NativeModel, NativeSequence

_FIRST_SLOTS = 2 * LEAST_CONTEXT
_MOST_SPARE = 2
"""Contexts kept without a sequence, for the next one."""


class Parked(NamedTuple):
    state: State
    held: int
    """Slots of the state: a context needs as many to take it."""
    length: int
    """Those that belong to the sequence; a fork's state is that of the whole sequence before it."""
    recurrent: State | None = None
    """State of the recurrent layers after `length` slots, if the state holds more."""


class Contexts:
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
            settings: of every context, but for its slots; and the most sequences of one.
            most: sequences that may have a context at once.
            most_slots: slots of all contexts beyond which none is kept without a sequence.
        """
        self._model, self._settings = model, settings
        self.span = model.span
        """See `NativeModel`."""
        self.counts_padding = model.offload is not None
        """Whether no call crosses it even with its padding, but those of the rows before it."""
        self._longest = whole(context_length + settings.rows)
        self._most, self._most_slots = most, most_slots
        self._lent: OrderedDict[Hashable, NativeSequence] = OrderedDict()  # least recent first
        self._parked: dict[Hashable, Parked] = {}
        self._free: dict[NativeContext, list[NativeSequence]] = {}  # places, of every context

    def lent_to(self, sequence: Hashable) -> bool:
        return sequence in self._lent

    def of(self, sequence: Hashable, end: int) -> NativeSequence:
        """The place of a sequence, as it was left, with room up to slot `end`."""
        place = self._lent.get(sequence)
        if place is not None and place.slots < end:
            self._park(sequence)
            place = None
        if place is None:
            place = self._lend(sequence, end)
        self._lent.move_to_end(sequence)
        return place

    def shorten(self, sequence: Hashable, length: int) -> None:
        """Drop a sequence's slots from `length` on, if they are in a context that can do so."""
        place = self._lent.get(sequence)
        if place is not None and place.length > length and place.can_truncate(length):
            place.truncate(length)

    def copy(
        self, sequence: Hashable, other: Hashable, shared: int, recurrent: State | None = None
    ) -> None:
        """Give `other` the first `shared` slots of a sequence.

        `recurrent` is the state of the recurrent layers after them, if there are such layers.
        """
        parked = self._parked.get(sequence) or _parked(self.of(sequence, shared))
        self._parked[other] = parked._replace(length=shared, recurrent=recurrent)

    def park(self, sequence: Hashable, parked: Parked) -> None:
        self._parked[sequence] = parked

    def forget(self, sequence: Hashable) -> None:
        self._parked.pop(sequence, None)
        place = self._lent.pop(sequence, None)
        if place is not None:
            self._give_back(place)

    def rest(self) -> None:
        """Park every sequence; contexts beyond the spare ones are freed."""
        while self._lent:
            self._park(next(iter(self._lent)))

    def close(self) -> None:
        for context in self._free:
            context.close()
        self._lent.clear()
        self._parked.clear()
        self._free.clear()

    @property
    def _slots(self) -> int:
        return sum(context.settings.slots * len(context.sequences) for context in self._free)

    @property
    def _spare(self) -> list[NativeContext]:
        return [
            context for context, free in self._free.items() if len(free) == len(context.sequences)
        ]

    def _lend(self, sequence: Hashable, end: int) -> NativeSequence:
        binding = self._model.binding
        while self._lent and (len(self._lent) >= self._most or binding.is_full):
            self._park(next(iter(self._lent)))
        parked = self._parked.get(sequence)
        slots = _FIRST_SLOTS
        while slots < max(end, parked.held if parked else 0):
            slots *= 2
        free = self._free[self._context(min(slots, self._longest))]
        # Low numbers first: rows of a call are of sequences whose numbers follow one another.
        place = min(free, key=lambda place: place.number)
        if parked is not None:
            place.restore(parked.state, parked.length, parked.recurrent)
            del self._parked[sequence]
        free.remove(place)
        self._lent[sequence] = place
        return place

    def _context(self, slots: int) -> NativeContext:
        spare = self._spare
        shared = [
            context
            for context, free in self._free.items()
            if free and context not in spare and context.settings.slots >= slots
        ]
        if shared:
            return max(shared, key=lambda context: context.settings.slots)
        # One that is far larger is left to a sequence that needs it, or in time all would be large.
        fitting = [context for context in spare if slots <= context.settings.slots <= 2 * slots]
        if fitting:
            return min(fitting, key=lambda context: context.settings.slots)
        while spare and (
            self._model.binding.is_full
            or len(self._free) >= self._most
            or self._slots + slots > self._most_slots
        ):
            self._close(spare.pop(0))
        sequences = min(self._settings.sequences, (self._most_slots - self._slots) // slots)
        settings = self._settings._replace(slots=slots, sequences=max(sequences, 1))
        context = self._model.context(settings)
        self._free[context] = list(context.sequences)
        return context

    def _park(self, sequence: Hashable) -> None:
        place = self._lent[sequence]
        if place.length:
            self._parked[sequence] = _parked(place)
        del self._lent[sequence]
        self._give_back(place)

    def _give_back(self, place: NativeSequence) -> None:
        place.truncate(0)
        self._free[place.context].append(place)
        spare = self._spare
        too_many = len(spare) > _MOST_SPARE or self._slots > self._most_slots
        if place.context in spare and (too_many or self._model.binding.is_full):
            self._close(place.context)

    def _close(self, context: NativeContext) -> None:
        del self._free[context]
        context.close()


def _parked(place: NativeSequence) -> Parked:
    return Parked(place.state(), place.length, place.length)


def whole(slots: int) -> int:
    return -(-slots // LEAST_CONTEXT) * LEAST_CONTEXT
