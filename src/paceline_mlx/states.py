"""The caches of one sequence, and their rollback to an earlier position.

KV caches are trimmed. A recurrent state is restored from before a forward pass and, if the pass was
recorded, replayed up to the row. Otherwise the tokens since then must be run again: `accept`
returns fewer slots. Arrays stay lazy until the engine evaluates them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from paceline_mlx.caches import SlidingCache, can_trim, copy_without, is_recurrent, leaves
from paceline_mlx.hooks import Array
from paceline_mlx.rollback import RecordedCall, Recorder

_KEPT = 4
"""Maximum saved recurrent states at ends of prompts and their chunks; a state can be large."""


class Checkpoint(NamedTuple):
    at: int
    recurrent: list[list[Array | None]]
    """The arrays of every recurrent cache."""
    recorded: list[RecordedCall]
    """The recurrent layers' calls, for replay; empty if the forward pass was not recorded."""
    rows: int


class States:
    """The caches of one sequence, empty at first."""

    def __init__(self, make: Callable[[], list[Any]], recorder: Recorder | None) -> None:
        """Create caches with `make`; `recorder` is the model's if it has recurrent layers."""
        self._make, self._recorder = make, recorder
        self._use(make())
        self.held = 0
        self._recent: list[Checkpoint] = []  # before the drafted passes since `accept`
        self._kept: list[Checkpoint] = []
        self._drafted = False  # whether the last pass was drafted

    def accept(self, length: int) -> int:
        """Keep the sequence's first `length` tokens, which were accepted; drop all later ones.

        Returns the number of slots that are left; the caller must run the tokens after them again.
        """
        self.roll_back(length)
        self._recent = []
        self._kept = [saved for saved in self._kept if saved.at <= length]
        return self.held

    def roll_back(self, length: int) -> None:
        """Drop the slots starting at `length`, and earlier ones if no state was saved there."""
        if length >= self.held:
            return
        at, saved = self._reachable(length, replay=True)
        if not at:
            self._use(self._make())
            self.held, self._recent, self._kept, self._drafted = 0, [], [], False
            return
        for cache in self._slots:
            cache.trim(self.held - at)
        if saved is not None:
            self._restore(saved)
            if saved.at < at and self._recorder is not None:
                self._recorder.replay(saved.recorded, at - saved.at)
        self.held = at

    @contextmanager
    def call(self, rows: int, *, drafted: bool) -> Iterator[list[Any]]:
        """Yield the caches for a pass of `rows` rows; record it if `drafted`, for rollback."""
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
                covered = {cache for call in recorded for cache in call.caches}
                if covered == {id(cache) for cache in self._recurrent}:
                    saved = saved._replace(recorded=recorded)
                self._recent.append(saved)
            else:
                yield self.caches
        self.held += rows

    def stretch(self, rows: int) -> None:
        """Append `rows` slots with random keys and values, to measure a long context."""
        for cache in self._slots:
            slots = cache.slots if isinstance(cache, SlidingCache) else cache
            keys, values, held = slots.state
            longer = []
            for array in (keys, values):
                shape = [*array.shape[:2], rows, *array.shape[3:]]
                drawn = mx.random.normal(shape).astype(array.dtype)
                longer.append(mx.concatenate([array[..., :held, :], drawn], axis=2))
            slots.state = (*longer, held + rows)
        self.held += rows

    def fork(self, length: int) -> "States":
        """Return a copy with up to `length` slots, the most possible without running the model."""
        other = States(self._make, self._recorder)
        at, saved = self._reachable(length, replay=False)
        if not at:
            return other
        other._use([copy_without(cache, self.held - at) for cache in self.caches])
        if saved is not None:
            other._restore(saved)
        other.held = at
        other._kept = [saved._replace(recorded=[]) for saved in self._kept if saved.at <= at]
        return other

    def fork_length(self, length: int) -> int:
        return self._reachable(length, replay=False)[0]

    def arrays(self) -> list[Any]:
        """Return all arrays to evaluate before another thread may run the next forward pass."""
        states = [saved.recurrent for saved in (*self._kept, *self._recent)]
        recorded = [call.arrays for saved in self._recent for call in saved.recorded]
        return [[cache.state for cache in leaves(self.caches)], states, recorded]

    def _reachable(self, length: int, *, replay: bool) -> tuple[int, Checkpoint | None]:
        """Return the most slots, up to `length`, that the caches can be cut to, and a checkpoint.

        Recurrent states are restored from the checkpoint, if any; recorded rows after it can be
        replayed. Returns 0 slots if the caches cannot be cut that far.
        """
        if length >= self.held:
            return self.held, None
        at, saved = length, None
        if self._recurrent:
            checkpoints = [one for one in (*self._recent, *self._kept) if one.at <= length]
            if not checkpoints:
                return 0, None
            saved = max(checkpoints, key=lambda one: one.at)  # of equals, a recorded one
            if not (replay and saved.recorded and length <= saved.at + saved.rows):
                at = saved.at
        possible = all(can_trim(cache, self.held - at) for cache in self._slots)
        return (at, saved) if possible else (0, None)

    def _use(self, caches: list[Any]) -> None:
        self.caches = caches
        leaf_caches = list(leaves(caches))
        self._recurrent = [cache for cache in leaf_caches if is_recurrent(cache)]
        self._slots = [cache for cache in leaf_caches if not is_recurrent(cache)]

    def _restore(self, saved: Checkpoint) -> None:
        for cache, before in zip(self._recurrent, saved.recurrent, strict=True):
            cache.cache = list(before)
