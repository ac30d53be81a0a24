"""The caches of one sequence, and their rollback to an earlier position.

KV caches are trimmed. A recurrent state is restored from before a call and, if the call was
recorded, replayed to the row. Otherwise the tokens since then must be run again: `settle`
returns fewer slots. Arrays stay lazy until the engine evaluates them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from paceline_mlx.caches import SlidingCache, can_trim, copy_without, is_recurrent, leaves
from paceline_mlx.hooks import Array
from paceline_mlx.rollback import RecordedCall, Recorder

_KEPT = 4
"""Most saved recurrent states from ends of prompt chunks and prompts; a state can be large."""


class Checkpoint(NamedTuple):
    """The state before a call."""

    at: int
    """Slots in the caches."""
    recurrent: list[list[Array | None]]
    """The arrays of every recurrent cache."""
    recorded: list[RecordedCall]
    """The calls of the recurrent layers, for replay; empty if the call was not recorded."""
    rows: int
    """Rows of the call."""


class States:
    """The caches of one sequence. Empty when new."""

    def __init__(self, make: Callable[[], list[Any]], recorder: Recorder | None) -> None:
        """`make` returns empty caches; `recorder` is the model's if it has recurrent layers."""
        self._make, self._recorder = make, recorder
        self._use(make())
        self.held = 0
        """Slots in the caches."""
        self._recent: list[Checkpoint] = []  # before the drafted calls since `settle`
        self._kept: list[Checkpoint] = []
        self._drafted = False  # the last call was

    def settle(self, length: int) -> int:
        """Roll back to `length` slots, or to the nearest possible position before.

        Args:
            length: accepted tokens of the sequence.

        Returns:
            Slots in the caches now. The caller must run the tokens from there to `length` again.
        """
        if length < self.held:
            self._roll_back(length)
        self._recent = []
        self._kept = [saved for saved in self._kept if saved.at <= length]
        return self.held

    def drop_padding(self, length: int) -> None:
        """Roll back to `length` slots, some of them of the last call, within a block."""
        if length < self.held:
            self._roll_back(length)

    @contextmanager
    def call(self, rows: int, *, drafted: bool) -> Iterator[list[Any]]:
        """The caches for a call of `rows` rows; recorded if `drafted`, as rows may be rejected."""
        for cache in self._slots:
            if isinstance(cache, SlidingCache):
                cache.drop()
        if not self._recurrent or self._recorder is None:
            yield self.caches
        else:
            arrays = [list(cache.cache) for cache in self._recurrent]
            saved = Checkpoint(self.held, arrays, [], rows)
            if not drafted or not self._drafted:
                self._kept = [*self._kept, saved][-_KEPT:]
            self._drafted = drafted
            if drafted:
                with self._recorder.recording(self._recurrent, rows) as recorded:
                    yield self.caches
                self._recent.append(saved._replace(recorded=self._whole(recorded)))
            else:
                yield self.caches
        self.held += rows

    def stretch(self, rows: int) -> None:
        """Append `rows` slots with random keys and values, to measure a long context."""
        for cache in self._slots:
            slots = cache.slots if isinstance(cache, SlidingCache) else cache
            keys, values, held = slots.state
            longer = [
                mx.concatenate(
                    [
                        array[..., :held, :],
                        mx.random.normal(_longer(array, rows)).astype(array.dtype),
                    ],
                    axis=2,
                )
                for array in (keys, values)
            ]
            slots.state = (*longer, held + rows)
        self.held += rows

    def fork(self, length: int) -> "States":
        """A copy with up to `length` slots, as many as are possible without running the model."""
        other = States(self._make, self._recorder)
        at, arrays = self._fork_point(length)
        if not at:
            return other
        other._use([copy_without(cache, self.held - at) for cache in self.caches])
        if arrays is not None:
            other._restore(arrays)
        other.held = at
        other._kept = [saved._replace(recorded=[]) for saved in self._kept if saved.at <= at]
        return other

    def fork_length(self, length: int) -> int:
        """Slots that `fork(length)` would have."""
        return self._fork_point(length)[0]

    def arrays(self) -> list[Any]:
        """All arrays to evaluate before another thread may make the next call."""
        states = [saved.recurrent for saved in (*self._kept, *self._recent)]
        recorded = [call.arrays for saved in self._recent for call in saved.recorded]
        return [[cache.state for cache in leaves(self.caches)], states, recorded]

    def _fork_point(self, length: int) -> tuple[int, list[list[Array | None]] | None]:
        """Slots of a fork, and the recurrent arrays to restore; None: those of now."""
        at, arrays = min(length, self.held), None
        if self._recurrent and length < self.held:
            best = self._nearest(length)
            if best is None:
                return 0, None
            at, arrays = best.at, best.recurrent
        possible = all(can_trim(cache, self.held - at) for cache in self._slots)
        return (at, arrays) if possible else (0, None)

    def _reset(self) -> None:
        self._use(self._make())
        self.held, self._recent, self._kept, self._drafted = 0, [], [], False

    def _use(self, caches: list[Any]) -> None:
        self.caches = caches
        leaf_caches = list(leaves(caches))
        self._recurrent = [cache for cache in leaf_caches if is_recurrent(cache)]
        self._slots = [cache for cache in leaf_caches if not is_recurrent(cache)]

    def _roll_back(self, length: int) -> None:
        saved, at = None, length
        if self._recurrent:
            saved = self._nearest(length)
            if saved is None:
                return self._reset()
            replayed = saved.recorded and length <= saved.at + saved.rows
            at = length if replayed else saved.at
        if not all(can_trim(cache, self.held - at) for cache in self._slots):
            return self._reset()
        for cache in self._slots:
            cache.trim(self.held - at)
        if saved is not None:
            self._restore(saved.recurrent)
            if saved.at < at and self._recorder is not None:
                self._recorder.replay(saved.recorded, at - saved.at)
        self.held = at
        return None

    def _nearest(self, length: int) -> Checkpoint | None:
        """The last checkpoint at or before `length`; of two, the recorded one."""
        checkpoints = [saved for saved in (*self._recent, *self._kept) if saved.at <= length]
        return max(checkpoints, key=lambda saved: saved.at, default=None)

    def _restore(self, arrays: Sequence[list[Array | None]]) -> None:
        for cache, before in zip(self._recurrent, arrays, strict=True):
            cache.cache = list(before)

    def _whole(self, recorded: list[RecordedCall]) -> list[RecordedCall]:
        """The recorded calls if they cover every recurrent cache, else none."""
        covered = {cache for call in recorded for cache in call.caches}
        return recorded if covered == {id(cache) for cache in self._recurrent} else []


def _longer(array: Array, rows: int) -> list[int]:
    return [*array.shape[:2], rows, *array.shape[3:]]
