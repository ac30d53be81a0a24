"""Sequences of the engine, and a pool of contexts assigned to the active ones.

    sequence A  ->  context of 512 slots       runs
    sequence B  ->  state, 3 MB                evicted: ran longest ago when C needed a context
    sequence C  ->  context of 1,024 slots     was of 512, until it had 500 tokens

A sequence's keys and values are in a *place* of a context while it runs, and in a *state*, a plain
array, while it waits: a context also holds the memory of passes, so they are few. KV blocks only
count slots. A fork starts from a state, so sequences share nothing, and each has its own slots.

A context's slots are allocated and zeroed when it is created, so it starts small and doubles; the
copy costs as much as reading the KV once. If several sequences share passes, a context has several
places, and a sequence takes one in the largest context: sequences in the same context share passes.
Invariant: a sequence's keys and values are in one place, and moving them changes no bit. A failing
pass therefore comes before or after a move.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple, Self

from paceline.decoding.types import Block, Logits, Taps
from paceline.engines.base import KVState
from paceline.engines.kv_blocks import BlockPool, BlockTable
from paceline.engines.llamacpp.binding import MIN_CONTEXT, ContextSettings, State
from paceline.engines.llamacpp.native import NativeContext, NativeModel, NativeSequence
from paceline.engines.rows import RowRange
from paceline.errors import ModelError

PADDING = 0
"""Token of padding rows; every vocabulary has it."""

_FIRST_SLOTS = 2 * MIN_CONTEXT
_MAX_SPARE = 2
"""Contexts kept without a sequence, for the next one."""


class EvictedState(NamedTuple):
    state: State
    held: int
    """Slots of the state: a context needs that many to load it."""
    length: int
    """Slots of this sequence; a fork's state is that of the whole sequence before it."""
    recurrent: State | None = None
    """Recurrent state after `length` slots, if the state holds more."""


class Contexts:
    def __init__(
        self,
        model: NativeModel,
        context_length: int,
        settings: ContextSettings,
        *,
        max_contexts: int,
        max_slots: int,
    ) -> None:
        """Start with no contexts.

        Args:
            model: the model that they share.
            context_length: maximum slots of a sequence.
            settings: settings of every context except its slots; `sequences` is a maximum.
            max_contexts: sequences that may have a context at once.
            max_slots: slots of all contexts above which none is kept without a sequence.
        """
        self._model, self._settings = model, settings
        self.span = model.span
        """See `NativeModel`."""
        self.counts_padding = model.offload is not None
        """True if no pass may cross it, even with padding, except for the rows just before it."""
        self._longest = round_up_slots(context_length + settings.rows)
        self._max_contexts, self._max_slots = max_contexts, max_slots
        self._lent: OrderedDict[Hashable, NativeSequence] = OrderedDict()  # least recent first
        self._evicted: dict[Hashable, EvictedState] = {}
        self._free: dict[NativeContext, list[NativeSequence]] = {}  # places, of every context

    def is_assigned_to(self, sequence: Hashable) -> bool:
        return sequence in self._lent

    def acquire(self, sequence: Hashable, end: int) -> NativeSequence:
        """Return a sequence's place, as it was left, with room up to slot `end`."""
        place = self._lent.get(sequence)
        if place is not None and place.slots < end:
            self._park(sequence)
            place = None
        if place is None:
            place = self._lend(sequence, end)
        self._lent.move_to_end(sequence)
        return place

    def shorten(self, sequence: Hashable, length: int) -> None:
        """Drop a sequence's slots starting at `length`, if its context can do so."""
        place = self._lent.get(sequence)
        if place is not None and place.length > length and place.can_truncate(length):
            place.truncate(length)

    def copy(
        self, sequence: Hashable, other: Hashable, shared: int, recurrent: State | None = None
    ) -> None:
        """Give `other` the first `shared` slots of a sequence.

        `recurrent` is the recurrent state after them, if the model has recurrent layers.
        """
        evicted = self._evicted.get(sequence) or _evicted_state(self.acquire(sequence, shared))
        self._evicted[other] = evicted._replace(length=shared, recurrent=recurrent)

    def evict(self, sequence: Hashable, evicted: EvictedState) -> None:
        self._evicted[sequence] = evicted

    def forget(self, sequence: Hashable) -> None:
        self._evicted.pop(sequence, None)
        place = self._lent.pop(sequence, None)
        if place is not None:
            self._give_back(place)

    def rest(self) -> None:
        """Park every sequence and free contexts beyond the spare ones."""
        while self._lent:
            self._park(next(iter(self._lent)))

    def close(self) -> None:
        for context in self._free:
            context.close()
        self._lent.clear()
        self._evicted.clear()
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
        while self._lent and (len(self._lent) >= self._max_contexts or binding.is_full):
            self._park(next(iter(self._lent)))
        evicted = self._evicted.get(sequence)
        slots = _FIRST_SLOTS
        while slots < max(end, evicted.held if evicted else 0):
            slots *= 2
        free = self._free[self._context(min(slots, self._longest))]
        # Low numbers first: sequences in a pass need consecutive numbers.
        place = min(free, key=lambda place: place.number)
        if evicted is not None:
            place.restore(evicted.state, evicted.length, evicted.recurrent)
            del self._evicted[sequence]
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
        # One that is far larger is left for a longer sequence; else all would become large.
        fitting = [context for context in spare if slots <= context.settings.slots <= 2 * slots]
        if fitting:
            return min(fitting, key=lambda context: context.settings.slots)
        while spare and (
            self._model.binding.is_full
            or len(self._free) >= self._max_contexts
            or self._slots + slots > self._max_slots
        ):
            self._close(spare.pop(0))
        sequences = min(self._settings.sequences, (self._max_slots - self._slots) // slots)
        settings = self._settings._replace(slots=slots, sequences=max(sequences, 1))
        context = self._model.context(settings)
        self._free[context] = list(context.sequences)
        return context

    def _park(self, sequence: Hashable) -> None:
        place = self._lent[sequence]
        if place.length:
            self._evicted[sequence] = _evicted_state(place)
        del self._lent[sequence]
        self._give_back(place)

    def _give_back(self, place: NativeSequence) -> None:
        place.truncate(0)
        self._free[place.context].append(place)
        spare = self._spare
        too_many = len(spare) > _MAX_SPARE or self._slots > self._max_slots
        if place.context in spare and (too_many or self._model.binding.is_full):
            self._close(place.context)

    def _close(self, context: NativeContext) -> None:
        del self._free[context]
        context.close()


def _evicted_state(place: NativeSequence) -> EvictedState:
    return EvictedState(place.state(), place.length, place.length)


def round_up_slots(slots: int) -> int:
    return -(-slots // MIN_CONTEXT) * MIN_CONTEXT


class LlamaSequence(BlockTable):
    def __init__(self, pool: BlockPool, context_length: int, contexts: Contexts) -> None:
        super().__init__(pool, context_length)
        self._contexts = contexts
        self.taps: Taps = {}
        """Hidden states of the last block's rows."""

    @property
    def is_evicted(self) -> bool:
        return not self._contexts.is_assigned_to(self)

    def place(self, rows: int) -> NativeSequence:
        """Return a place with room for `rows` rows; `prepare` makes it hold `length` slots."""
        return self._contexts.acquire(self, self.length + rows)

    def prepare(self, place: NativeSequence, run: Callable[[Block], object]) -> None:
        """Drop rows that are not in the sequence; compute missing ones again with `run`."""
        if place.length > self.length:
            place.truncate(self.length)

    def parts(self, block: Block, at: int, rows: RowRange, outputs: int) -> list[slice]:
        """Split a block's rows into passes.

        Args:
            block: the block.
            at: tokens before it.
            rows: row counts of a pass.
            outputs: maximum rows of a pass that get logits: others with logits run in further
                passes, padded as usual.
        """
        count, span = len(block.tokens), self._contexts.span
        # Bits depend on keys up to the pass's last row, in steps of `span`. With passes of 4 rows,
        # row 252 is the last one whose padded pass ends before 256; those after it run together.
        last = at + rows.min_rows - 1 if self._contexts.counts_padding else at
        cuts = range(span - last % span, count, span) if span else ()
        return parts_between(block, {0, *cuts, count}, rows, outputs)

    def on_rows_computed(self, place: NativeSequence, rows: int) -> None:
        """Handle that `rows` rows of the block are in the context."""

    def failed(self) -> None:
        """Handle a failed or interrupted pass of the sequence."""

    def _new(self) -> Self:
        other = type(self)(self._pool, self._context_length, self._contexts)
        other.shares_answers = self.shares_answers
        return other

    def _copy(self, fork: Self, shared: int) -> None:
        self._contexts.copy(self, fork, shared)

    def restore(self, state: KVState, length: int) -> None:
        self.close()
        self.reserve(length)
        super().commit(length)
        self._shareable_length = length
        self._contexts.evict(self, EvictedState(state.data, state.length, length))
        try:
            self.place(1)  # the library reads it
        except ModelError:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        self._contexts.forget(self)


def parts_between(block: Block, cuts: set[int], rows: RowRange, outputs: int) -> list[slice]:
    """Split a block's rows into passes that cross none of `cuts`; see `LlamaSequence.parts`."""
    first = len(block.tokens) - block.rows
    ends = sorted(cuts | {first} if block.rows > outputs else cuts)
    parts = []
    for start, stop in pairwise(ends):
        max_rows = min(rows.max_rows, outputs) if start >= first else rows.max_rows
        inner = RowRange(rows.min_rows, max_rows).split(stop - start)
        parts += [slice(start + part.start, start + part.stop) for part in inner]
    return parts


def call(
    place: NativeSequence,
    tokens: Sequence[int],
    part: slice,
    *,
    first: int,
    min_rows: int,
    min_outputs: int,
) -> Logits:
    """Run a part of a block in one pass; return logits from the block's row `first`.

    If that is fewer than `min_outputs` rows, adjacent rows also get logits.
    """
    rows = tokens[part]
    padded = [*rows, *[PADDING] * (min_rows - len(rows))]
    start = place.length
    output = min(max(first - part.start, 0), len(rows))  # the first row that gets logits
    begin = min(output, max(len(padded) - min_outputs, 0))
    end = max(len(rows), begin + min_outputs) if output < len(rows) else begin
    logits = place.decode(padded, slice(begin, end))[output - begin : len(rows) - begin]
    place.truncate(start + len(rows))
    return logits
