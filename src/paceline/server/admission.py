"""Admission by KV budget: how long an answer may get, and when a request may begin.

A request is admitted when the KV cache has slots for what is still missing of its prompt and for
some tokens of its answer, beside what the running requests were admitted for. Answers that get
longer take blocks as they need them; when those run out, the scheduler preempts. Nothing is evicted
from the prefix cache for a request that is not admitted.

Knows tickets, slots and the prefix cache. Knows nothing of calls, or of what runs when.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.server.prefix_cache import Begun, PromptCache, release
from paceline.server.request import Ticket

_HEADROOM = 128
"""Tokens by which each running answer can grow before a request is admitted beside it. Fewer admit
more requests at once, and preempt more often; a preempted answer is computed again."""


class Admission:
    """Admits requests to the KV cache of one engine."""

    def __init__(
        self,
        engine: Engine,
        prompts: PromptCache,
        draft_slots: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        """Count the engine's slots: no sequence may be open.

        Args:
            engine: whose KV cache it is.
            prompts: its prefix cache, which gives way to requests.
            draft_slots: KV slots that a drafter has for all requests together, by its spec; None
                for one that has none of its own.
        """
        self._engine, self._prompts, self._draft_slots = engine, prompts, draft_slots
        self._slots = engine.free_slots
        self._refused: tuple[Ticket, int, int, int] | None = None

    @property
    def most(self) -> int:
        """The most tokens that prompt and answer of a request can have together."""
        return min(self._engine.context_length, self._slots)

    def settle(self, ticket: Ticket) -> None:
        """Set how long a request's answer may get, so that it fits the cache when it runs alone.

        Raises:
            InvalidRequest: its prompt has unknown tokens, or does not fit.
        """
        count, context = len(ticket.tokens), self._engine.context_length
        known = self._engine.vocab_size
        if not all(0 <= token < known for token in ticket.tokens):
            raise InvalidRequest(f"prompt has token ids outside 0 to {known - 1}")
        if count >= context:
            raise InvalidRequest(
                f"the prompt has {count} tokens and the context holds {context}, the answer "
                "included; shorten the prompt"
            )
        room = self.most - count
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {count} tokens and the cache holds {self._slots}; shorten the "
                "prompt, or start with more cache_tokens"
            )
        most = min(ticket.request.max_tokens or room, room)
        ticket.request = replace(ticket.request, max_tokens=most)
        ticket.most_tokens = count + most

    def admit(self, ticket: Ticket, running: Sequence[Ticket]) -> Begun | None:
        """A sequence for a request, with the prefix that the cache holds; None: it has to wait.

        With nothing running a request is admitted in any case: `settle` has seen that it fits.
        """
        state = ticket, self._engine.free_slots, len(running), len(self._prompts)
        if state == self._refused or not self._fits_drafter(ticket, running):
            return None  # asked before every call, and nothing has changed since the last one
        prompt = np.array(ticket.tokens, np.int64)
        begun = (
            self._prompts.begin(prompt, ticket.salt)
            if ticket.cached
            else Begun(self._engine.open())
        )
        try:
            needed = sum(self._growth(each, each.held) for each in running)
            needed += self._growth(ticket, begun.slots.length)
            if self._prompts.make_room(needed) or not running:
                return begun
            if ticket.cached:
                self._prompts.put_back(prompt, begun, ticket.salt)
            else:
                release(begun.slots)
        except Exception:
            release(begun.slots)
            raise
        self._refused = state
        return None

    def short(self, rows: int, sequences: int) -> bool:
        """Whether a call with that many rows and sequences may have found too few slots."""
        return self._engine.free_slots < rows + sequences * self._engine.block_size

    def usage(self, running: Sequence[Ticket]) -> float:
        """How much of the slots requests hold, 0 to 1; what they share counts for each."""
        return min(sum(self._whole(each.held) for each in running) / self._slots, 1.0)

    def _fits_drafter(self, ticket: Ticket, running: Sequence[Ticket]) -> bool:
        """Whether the drafter's own KV cache has room for the request, beside those that use it."""
        slots = self._draft_slots(ticket.request.drafter)
        if slots is None or not running:
            return True
        users = [ticket, *(t for t in running if self._draft_slots(t.request.drafter) == slots)]
        return sum(self._whole(self._goal(each)) for each in users) <= slots

    def _growth(self, ticket: Ticket, held: int) -> int:
        """Slots that a request with `held` of them is expected to take soon."""
        return max(self._whole(self._goal(ticket)) - self._whole(held), 0)

    def _goal(self, ticket: Ticket) -> int:
        """The tokens that a request is admitted for: those it has, and some of its answer."""
        return min(ticket.most_tokens, ticket.count + _HEADROOM)

    def _whole(self, slots: int) -> int:
        """`slots` in whole blocks."""
        size = self._engine.block_size
        return -(-slots // size) * size
