"""Admission by KV budget: a request's maximum length, and the time when it may start.

A request is admitted if the KV cache has slots for the rest of its prompt and for some tokens of
its answer, in addition to those reserved for running requests. Longer answers allocate blocks as
they grow; when none is left, the scheduler preempts. The prefix cache is evicted only for a request
that is then admitted.
"""

from collections.abc import Sequence
from weakref import ref

from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.runtime.batching.prefix_cache import CachedPrefix, PrefixCache, close_sequence
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.prompt import check_room

_HEADROOM = 128
"""Tokens reserved for each running answer before another request is admitted. A smaller value
admits more requests at once and preempts more often; a preempted answer is computed again."""


class Admission:
    """Admits requests to the KV cache of one engine."""

    def __init__(self, engine: Engine, prefix_cache: PrefixCache) -> None:
        """Count the engine's slots: no sequence may be open."""
        self._engine, self._prefix_cache = engine, prefix_cache
        self._slots = engine.free_slots
        self._last_rejected: tuple[ref[BatchRequest], int, int, int] | None = None

    @property
    def max_length(self) -> int:
        """The maximum tokens of prompt and answer together."""
        return min(self._engine.context_length, self._slots)

    def limit(self, queued: BatchRequest) -> None:
        """Limit `max_tokens` to what fits the cache alone. Raises InvalidRequest if none fit."""
        count = len(queued.tokens)
        check_room(count, self._engine.context_length)
        room = self.max_length - count
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {count} tokens and the cache holds {self._slots}; shorten the "
                "prompt, or start with more cache_tokens"
            )
        queued.request = queued.request.within(room)
        # Logprobs of the prompt need every row of it.
        queued.cached = queued.cached and not queued.request.prompt_logprobs

    def admit(self, queued: BatchRequest, running: Sequence[BatchRequest]) -> CachedPrefix | None:
        """Return a sequence with the prompt's cached prefix, or None if the request has to wait.

        If nothing is running, the request is admitted: `limit` has checked that it fits.
        """
        state = ref(queued), self._engine.free_slots, len(running), len(self._prefix_cache)
        if state == self._last_rejected or not self._fits_drafter(queued, running):
            return None  # tried before every pass; nothing has changed since the last one
        prefix = (
            self._prefix_cache.open(queued.prompt, queued.salt)
            if queued.cached
            else CachedPrefix(self._engine.open())
        )
        try:
            needed = sum(self._growth(other, other.slots) for other in running)
            needed += self._growth(queued, prefix.sequence.length)
            if self._prefix_cache.evict_for(needed) or not running:
                return prefix
            if queued.cached:
                self._prefix_cache.undo_open(queued.prompt, prefix, queued.salt)
            else:
                close_sequence(prefix.sequence)
        except Exception:
            close_sequence(prefix.sequence)
            raise
        self._last_rejected = state
        return None

    def lacks_slots(self, rows: int, sequences: int) -> bool:
        """Return whether a forward pass of this size may have lacked free slots."""
        return self._engine.free_slots < rows + sequences * self._engine.block_size

    def usage(self, running: Sequence[BatchRequest]) -> float:
        """Return the fraction of slots that requests hold, 0 to 1; shared slots count for each."""
        return min(sum(self._round_up(queued.slots) for queued in running) / self._slots, 1.0)

    def _fits_drafter(self, queued: BatchRequest, running: Sequence[BatchRequest]) -> bool:
        """Return whether the drafter's own KV cache also has slots for this request."""
        slots = _draft_slots(queued)
        if slots is None or not running:
            return True
        users = [queued, *(other for other in running if _draft_slots(other) == slots)]
        return sum(self._round_up(self._goal(user)) for user in users) <= slots

    def _growth(self, queued: BatchRequest, held: int) -> int:
        """Return the slots that a request holding `held` is expected to take soon."""
        return max(self._round_up(self._goal(queued)) - self._round_up(held), 0)

    def _goal(self, queued: BatchRequest) -> int:
        """Return the tokens that a request is admitted for: its own, and headroom to grow."""
        return min(queued.max_length, queued.count + _HEADROOM)

    def _round_up(self, slots: int) -> int:
        size = self._engine.block_size
        return -(-slots // size) * size


def _draft_slots(queued: BatchRequest) -> int | None:
    return queued.model.drafting.slots(queued.request.drafter)
