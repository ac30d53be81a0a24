"""Sequences of the engine, and the contexts of a model: few, lent to the sequences that run.

    sequence A  ->  context of 512 slots       runs
    sequence B  ->  state, 3 MB                parked: ran longest ago when C needed a context
    sequence C  ->  context of 1,024 slots     was of 512, until it had 500 tokens

A sequence's keys and values are in a *place* of a context while it runs, and in a *state*, a plain
array, while it waits: a context also holds the memory of calls, so few exist. KV blocks only count
slots. A fork starts from a state; so sequences share nothing, and each has slots of its own.

A context's slots are allocated and zeroed when it is made, so it begins small and doubles; the copy
costs as much as reading the keys and values once. Where several sequences share calls, a context
has places for several, and a sequence takes one in the largest context: those that are together
share calls. Invariant: a sequence's keys and values are in one place, and moving them changes no
bit; so a failing call comes before or after a move.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple, Self

from paceline.decoding.types import Block, Logits, Taps
from paceline.engines.base import KVState
from paceline.engines.kv_blocks import BlockPool, PrefillTable
from paceline.engines.llamacpp.binding import LEAST_CONTEXT, ContextSettings, State
from paceline.engines.llamacpp.native import NativeContext, NativeModel, NativeSequence
from paceline.engines.rows import RowRange
from paceline.errors import CacheFull, ModelError

PADDING = 0
"""Token of padding rows; every vocabulary has it."""

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


class LlamaSequence(PrefillTable):
    def __init__(self, pool: BlockPool, context_length: int, contexts: Contexts) -> None:
        super().__init__(pool, context_length)
        self._contexts = contexts
        self.taps: Taps = {}
        """Hidden states of the rows of its last block."""

    @property
    def parked(self) -> bool:
        return not self._contexts.lent_to(self)

    def place(self, rows: int) -> NativeSequence:
        """Its place with room for `rows` rows; `prepare` makes it hold `length` slots."""
        return self._contexts.of(self, self.length + rows)

    def prepare(self, place: NativeSequence, run: Callable[[Block], object]) -> None:
        """Drop what the sequence does not have; compute again, by `run`, what is missing."""
        if place.length > self.length:
            place.truncate(self.length)

    def parts(self, block: Block, at: int, rows: RowRange, outputs: int) -> list[slice]:
        """Rows of a block, by calls.

        Args:
            block: the block.
            at: tokens before it.
            rows: numbers of rows of a call.
            outputs: most rows of a call that get logits: more rows with logits have calls of their
                own, which are padded as any.
        """
        count, span = len(block.tokens), self._contexts.span
        # Bits depend on keys up to the call's last row, in steps of `span`. With calls of 4 rows,
        # row 252 is the last one whose padded call ends before 256; those after it go together.
        last = at + rows.least - 1 if self._contexts.counts_padding else at
        cuts = range(span - last % span, count, span) if span else ()
        return parts_between(block, {0, *cuts, count}, rows, outputs)

    def on_rows_computed(self, place: NativeSequence, rows: int) -> None:
        """Rows of the block, of which `rows` are in the context."""

    def failed(self) -> None:
        """A call of the sequence failed, or was interrupted."""

    def fork_length(self, length: int) -> int:
        return min(length, self.shareable_length)

    def fork(self, length: int) -> Self:
        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self.length} slots")
        fork = type(self)(self._pool, self._context_length, self._contexts)
        fork.shares_answers = self.shares_answers
        shared = self.fork_length(length)
        if not shared:
            return fork
        try:
            fork.reserve(shared)
        except CacheFull:
            return fork
        super(LlamaSequence, fork).commit(shared)
        fork._shareable_length = shared
        self._copy(fork, shared)
        return fork

    def _copy(self, fork: Self, shared: int) -> None:
        self._contexts.copy(self, fork, shared)

    def restore(self, state: KVState, length: int) -> None:
        """Hold the first `length` slots of a state; see `KeepsKV`."""
        self.close()
        self.reserve(length)
        super().commit(length)
        self._shareable_length = length
        self._contexts.park(self, Parked(state.data, state.length, length))
        try:
            self.place(1)  # the library reads it
        except ModelError:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        self._contexts.forget(self)


def parts_between(block: Block, cuts: set[int], rows: RowRange, outputs: int) -> list[slice]:
    """Rows of a block by calls that cross none of `cuts`; see `LlamaSequence.parts`."""
    first = len(block.tokens) - block.rows
    ends = sorted(cuts | {first} if block.rows > outputs else cuts)
    parts = []
    for start, stop in pairwise(ends):
        most = min(rows.most, outputs) if start >= first else rows.most
        inner = RowRange(rows.least, most).split(stop - start)
        parts += [slice(start + part.start, start + part.stop) for part in inner]
    return parts


def call(
    place: NativeSequence,
    tokens: Sequence[int],
    part: slice,
    *,
    first: int,
    least: int,
    least_outputs: int,
) -> Logits:
    """Run a part of a block in one call; logits of its rows from the block's row `first` on.

    Where these are fewer than `least_outputs`, rows beside them get logits, too.
    """
    rows = tokens[part]
    padded = [*rows, *[PADDING] * (least - len(rows))]
    start = place.length
    output = min(max(first - part.start, 0), len(rows))  # the first row that gets logits
    begin = min(output, max(len(padded) - least_outputs, 0))
    end = max(len(rows), begin + least_outputs) if output < len(rows) else begin
    logits = place.decode(padded, slice(begin, end))[output - begin : len(rows) - begin]
    place.truncate(start + len(rows))
    return logits
