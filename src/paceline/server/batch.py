"""The blocks of the next call: decodes, and as many rows of prefills as do not hold those up.

Knows tickets and what calls cost. Knows nothing of queues, or of what becomes of the rows.
"""

from collections.abc import Callable, Iterator

from paceline.decoding.auto import Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block
from paceline.runtime.stream import Stream
from paceline.server.batch_cost import SharedCost
from paceline.server.request import Ticket

Work = tuple[Stream, Block]
"""An answer and its next block."""

Fail = Callable[[Ticket, Exception], None]
"""Ends a request that has no block because of an error."""

_CALL_ROWS = 512
"""Rows of prefills in a call without decodes."""

_BESIDE_SECONDS = 0.1
"""What prefills may add to a call with decodes."""

_LEAST_CHUNK = 16
"""Rows of a prefill in a call, however many there are."""


class Batcher:
    """Puts calls together; learns from them what shared calls cost."""

    def __init__(self, alone: CostTable) -> None:
        """Begin with what the calls of one sequence cost."""
        self.cost = SharedCost(alone)

    def blocks(self, running: list[Ticket], fail: Fail) -> Iterator[tuple[Ticket, Work]]:
        """The blocks of a call, decodes first; `running` is put into the order of the next one.

        A request whose block cannot be made is ended by `fail` and left out.
        """
        decodes = [ticket for ticket in running if not _reads(ticket)]
        prefills = [ticket for ticket in running if _reads(ticket)]
        rate = sum(policy.rate for policy in map(_auto, decodes) if policy)
        rows = len(decodes)  # those that have no block yet have one row at least
        shared = len(running) > 1
        for ticket in decodes:
            try:
                if policy := _auto(ticket):
                    self._weigh(policy, len(decodes), rows, rate, shared=shared)
                work = _work(ticket)
            except Exception as error:  # of a drafter, a policy, or the form of the answer
                fail(ticket, error)
                continue
            rows += len(work[1].tokens) - 1
            yield ticket, work
        if not prefills:
            return
        room = _CALL_ROWS
        if decodes:
            room = min(room, max(int(_BESIDE_SECONDS / self.cost.row), _LEAST_CHUNK))
        share = max(room // len(prefills), _LEAST_CHUNK)
        turn = prefills[: max(room // share, 1)]
        for ticket in turn:
            try:
                work = _work(ticket, share)
            except Exception as error:
                fail(ticket, error)
                continue
            yield ticket, work
        # Those in this call are the last in line for the next.
        running.sort(key=lambda ticket: ticket in turn)

    def _weigh(self, policy: Auto, decodes: int, rows: int, rate: float, *, shared: bool) -> None:
        """Tell a policy what its rows cost in a call with `rows` rows so far."""
        if shared:
            policy.set_batch_load(self.cost(decodes, rows), self.cost.row, rate - policy.rate)
        else:
            policy.clear_batch_load()


def _reads(ticket: Ticket) -> bool:
    """Whether its next rows are those of a prompt, or are computed again."""
    assert ticket.stream is not None
    return ticket.stream.prefilling or ticket.stream.recomputing


def _auto(ticket: Ticket) -> Auto | None:
    assert ticket.stream is not None
    policy = ticket.stream.policy
    return policy if isinstance(policy, Auto) else None


def _work(ticket: Ticket, most: int | None = None) -> Work:
    assert ticket.stream is not None
    return ticket.stream, ticket.stream.next_block(most)
