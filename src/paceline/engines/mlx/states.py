"""What a model holds of one sequence, and how it gets back to a position that it has been at.

Slots are trimmed. A recurrence goes back to the state from before a call and, where the call was
recorded, on from there by `replay`; else the tokens since then have to be run again, which
`settle` says by returning less. Nothing is computed here: arrays are lazy until the engine
evaluates them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from paceline.engines.mlx.caches import Sliding, can_trim, copied, is_recurrent, leaves
from paceline.engines.mlx.hooks import Array
from paceline.engines.mlx.rollback import RecordedCall, Recorder

_KEPT = 4
"""States of recurrences that are kept from further back, where prompts were cut and ended: so many
at most, for they can be large."""


class Mark(NamedTuple):
    """What there was before a call."""

    at: int
    """Slots that were held."""
    recurrences: list[list[Array | None]]
    """The arrays of each cache without slots."""
    recorded: list[RecordedCall]
    """What the call then gave the recurrences; empty if it was not recorded."""
    rows: int
    """Rows of the call."""


class States:
    """The caches of one sequence. Empty when new."""

    def __init__(self, make: Callable[[], list[Any]], recorder: Recorder | None) -> None:
        """Caches come from `make`. `recorder` is the model's, if it has recurrences."""
        self._make, self._recorder = make, recorder
        self._use(make())
        self.held = 0
        """Slots that the caches hold."""
        self._marks: list[Mark] = []  # before each drafted call since `settle`
        self._kept: list[Mark] = []
        self._drafted = False  # whether the last call was

    def settle(self, length: int) -> int:
        """Go back to `length` slots, or as near before it as there is a way.

        Args:
            length: how many tokens of the sequence stand; those before it are as they were.

        Returns:
            Slots that are held now. The tokens from there to `length` have to be run again.
        """
        if length < self.held:
            self._go_back(length)
        self._marks = []
        self._kept = [mark for mark in self._kept if mark.at <= length]
        return self.held

    @contextmanager
    def call(self, rows: int, *, drafted: bool) -> Iterator[list[Any]]:
        """The caches, for a call of `rows` rows.

        `drafted`: the call's rows may fall, so it is recorded.
        """
        for cache in self._slots:
            if isinstance(cache, Sliding):
                cache.drop()
        if not self._recurrent or self._recorder is None:
            yield self.caches
        else:
            arrays = [list(cache.cache) for cache in self._recurrent]
            mark = Mark(self.held, arrays, [], rows)
            if not drafted or not self._drafted:
                self._kept = [*self._kept, mark][-_KEPT:]
            self._drafted = drafted
            if drafted:
                with self._recorder.recording(self._recurrent, rows) as recorded:
                    yield self.caches
                self._marks.append(mark._replace(recorded=self._whole(recorded)))
            else:
                yield self.caches
        self.held += rows

    def stretch(self, rows: int) -> None:
        """Pretend that `rows` more slots are held, with random keys and values; for measuring."""
        import mlx.core as mx

        for cache in self._slots:
            slots = cache.slots if isinstance(cache, Sliding) else cache
            keys, values, held = slots.state
            longer = [
                mx.concatenate(
                    [each[..., :held, :], mx.random.normal(_longer(each, rows)).astype(each.dtype)],
                    axis=2,
                )
                for each in (keys, values)
            ]
            slots.state = (*longer, held + rows)
        self.held += rows

    def fork(self, length: int) -> "States":
        """Another that holds as many of the first `length` slots as can be had without a call."""
        best = self._nearest(length)
        other = States(self._make, self._recorder)
        if not self._recurrent or self.held <= length:
            at, arrays = min(length, self.held), None
        elif best is not None:
            at, arrays = best.at, best.recurrences
        else:
            return other
        if not all(can_trim(cache, self.held - at) for cache in self._slots):
            return other
        other._use([copied(cache, self.held - at) for cache in self.caches])
        if arrays is not None:
            other._put_back(arrays)
        other.held = at
        other._kept = [mark._replace(recorded=[]) for mark in self._kept if mark.at <= at]
        return other

    def arrays(self) -> list[Any]:
        """All that has to be evaluated, so that the next call may come from another thread."""
        marks = [mark.recurrences for mark in (*self._kept, *self._marks)]
        heard = [each.projected for mark in self._marks for each in mark.recorded]
        given = [
            [*each.args, *each.kwargs.values()] for mark in self._marks for each in mark.recorded
        ]
        return [[cache.state for cache in leaves(self.caches)], marks, heard, given]

    def _start_over(self) -> None:
        self._use(self._make())
        self.held, self._marks, self._kept, self._drafted = 0, [], [], False

    def _use(self, caches: list[Any]) -> None:
        self.caches = caches
        each = list(leaves(caches))
        self._recurrent = [cache for cache in each if is_recurrent(cache)]
        self._slots = [cache for cache in each if not is_recurrent(cache)]

    def _go_back(self, length: int) -> None:
        mark, at = None, length
        if self._recurrent:
            mark = self._nearest(length)
            if mark is None:
                return self._start_over()
            replayed = mark.recorded and length <= mark.at + mark.rows
            at = length if replayed else mark.at
        if not all(can_trim(cache, self.held - at) for cache in self._slots):
            return self._start_over()
        for cache in self._slots:
            cache.trim(self.held - at)
        if mark is not None:
            self._put_back(mark.recurrences)
            if mark.at < at and self._recorder is not None:
                self._recorder.replay(mark.recorded, at - mark.at)
        self.held = at
        return None

    def _nearest(self, length: int) -> Mark | None:
        """The last mark at or before `length`; of two, the one whose call was recorded."""
        marks = [mark for mark in (*self._marks, *self._kept) if mark.at <= length]
        return max(marks, key=lambda mark: mark.at, default=None)

    def _put_back(self, arrays: Sequence[list[Array | None]]) -> None:
        for cache, before in zip(self._recurrent, arrays, strict=True):
            cache.cache = list(before)

    def _whole(self, recorded: list[RecordedCall]) -> list[RecordedCall]:
        """What was recorded, if nothing is missing."""
        heard = {one for each in recorded for one in each.caches}
        return recorded if heard == {id(cache) for cache in self._recurrent} else []


def _longer(array: Array, rows: int) -> list[int]:
    return [*array.shape[:2], rows, *array.shape[3:]]
