"""How many slots requests can need, of those that an engine has.

Knows tickets and slots. Knows nothing of the prompt cache, or of what runs when.
"""

from collections.abc import Iterable
from dataclasses import replace

from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.serving.tickets import Ticket


class Room:
    """The slots of an engine that nobody has used yet."""

    def __init__(self, engine: Engine) -> None:
        """Count them."""
        self._engine = engine
        self._slots = engine.free_slots

    @property
    def most(self) -> int:
        """The most tokens that prompt and answer of a request can have together."""
        return min(self._engine.context_length, self._slots)

    def settle(self, ticket: Ticket) -> None:
        """Settle how long an answer may get, and so how many slots its request can need.

        Raises:
            InvalidRequest: there are not so many.
        """
        count, context = len(ticket.tokens), self._engine.context_length
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
        ticket.slots_needed = self._whole(count + most)

    def missing(self, tickets: Iterable[Ticket]) -> int:
        """Slots that requests can still need, beside those that they hold."""
        return sum(ticket.slots_needed - self._held(ticket) for ticket in tickets)

    def usage(self, tickets: Iterable[Ticket]) -> float:
        """How much of the slots requests hold, 0 to 1; what they share counts for each."""
        return min(sum(map(self._held, tickets)) / self._slots, 1.0)

    def _held(self, ticket: Ticket) -> int:
        return 0 if ticket.begun is None else self._whole(ticket.begun.slots.length)

    def _whole(self, slots: int) -> int:
        """So many slots in whole blocks."""
        size = self._engine.block_size
        return -(-slots // size) * size
