"""Requests of many users in the calls of one engine.

One thread drives the engine: every call has the blocks of all running answers, and as many rows of
prompts as do not hold those up. Other threads submit requests; listeners get what becomes of them.

A request is admitted when the KV cache has room for it (`admission.py`), and takes blocks as it
needs them. When those run out, entries of the prefix cache are evicted, then the youngest request
is preempted: it waits, and later goes on to the same tokens. A request that ends leaves its KV to
the prefix cache.

The rule: whatever goes wrong with one request ends that request alone, a drafter that fails is
silenced, and no slot is lost. Every call out of this file that concerns a request is made where its
error is that request's; what is left is caught in `_run`, and the loop goes on, since a block whose
rows were not accepted is simply run again.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, perf_counter

import numpy as np

from paceline.decoding.generation import Step
from paceline.decoding.types import Block
from paceline.engines.base import StepResult
from paceline.errors import CacheFull, InvalidRequest
from paceline.runtime.loop import run_step
from paceline.runtime.model import Model
from paceline.runtime.options import Request
from paceline.runtime.result import Result
from paceline.server.admission import Admission
from paceline.server.batch import Batcher, Work
from paceline.server.prefix_cache import Begun, PromptCache, release
from paceline.server.request import (
    Done,
    Draining,
    Event,
    Failed,
    Listener,
    Load,
    Progress,
    QueueFull,
    Ticket,
    TimedOut,
)

log = logging.getLogger(__name__)

_LAST_CALL_SECONDS = 60.0
"""How long the end waits for a call of the engine that is under way."""

_WORTH_WAITING = 32
"""Tokens of a prefix that another request is prefilling for which a request waits."""

_MOST_FAULTS = 8
"""Errors of no request's own, one turn after the other, after which all requests are ended."""


class Scheduler:
    """The scheduler of one model; see the top of this file."""

    def __init__(self, model: Model, *, most_waiting: int = 256, most_running: int = 64) -> None:
        """Prepare; `start` begins.

        Args:
            model: loaded, with the drafters that requests may ask for. Nobody else may use it.
            most_waiting: requests that may wait for their turn.
            most_running: answers that are written at once.
        """
        self.model = model
        self.prompts = PromptCache(model.engine)
        self.admission = Admission(model.engine, self.prompts, model.draft_slots)
        self.load = Load()
        self._most_waiting, self._most_running = most_waiting, most_running
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._unfinished = 0  # submitted, and not ended
        self._wake = threading.Condition()
        self._draining = self._failing = self._stopped = False
        self._began: float | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._batcher = Batcher(model.measurement.cost)

    def start(self) -> None:
        """Begin to work."""
        self._warm_up()
        self._thread.start()

    def _warm_up(self) -> None:
        """An engine may compile something for its first call of several sequences: do it now."""
        sequences = [self.model.engine.open() for _ in range(2)]
        with suppress(Exception):  # whatever it is, the first request will meet it, too
            self.model.engine.step([(each, Block([0], 1)) for each in sequences])
        for each in sequences:
            each.close()

    @property
    def alive(self) -> bool:
        """Whether the thread that drives the engine is at work."""
        return self._thread.is_alive()

    @property
    def call_seconds(self) -> float:
        """How long the engine has been at its present call; 0.0 between calls."""
        began = self._began
        return 0.0 if began is None else perf_counter() - began

    @property
    def failing(self) -> bool:
        """Whether all requests were ended for a fault of ours, and none was served since."""
        return self._failing

    @property
    def draining(self) -> bool:
        """Whether it takes no more requests."""
        return self._draining

    @property
    def usage(self) -> float:
        """How much of the slots running requests hold, 0 to 1; what they share counts for each."""
        return self.admission.usage(list(self._running))

    def submit(
        self,
        tokens: Sequence[int],
        request: Request,
        listener: Listener,
        *,
        salt: str = "",
        cached: bool = True,
        seconds: float | None = None,
    ) -> Ticket:
        """Put a request into the queue.

        Args:
            tokens: the prompt.
            request: how to answer it.
            listener: gets its events, in the engine's thread: it must be quick.
            salt: its prompt shares nothing with those under another salt.
            cached: whether its prompt may be found in the prefix cache, and left there.
            seconds: how long it may take, waiting included; None: without a limit.

        Raises:
            InvalidRequest: it could never be served.
            QueueFull: too many wait.
            Draining: the server is ending.
        """
        ticket = Ticket(
            tokens,
            request,
            listener,
            salt,
            cached and not request.prompt_logprobs,
            None if seconds is None else monotonic() + seconds,
        )
        missing = self.model.taps_for(request) - set(self.model.engine.taps)
        if missing:
            raise InvalidRequest(
                f"drafter {request.drafter} looks at hidden states that the model was loaded "
                "without; start with it"
            )
        self.admission.settle(ticket)
        with self._wake:
            if self._draining:
                raise Draining("the server is ending and takes no more requests")
            if len(self._waiting) >= self._most_waiting:
                self.load.refused += 1
                raise QueueFull(f"{len(self._waiting)} requests wait already; try again later")
            self._waiting.append(ticket)
            self._unfinished += 1
            self.load.submitted += 1
            self.load.waiting = len(self._waiting)
            self._wake.notify()
        return ticket

    def close(self, grace: float = 0.0) -> None:
        """Take no more requests, let those that were taken go on for `grace` seconds, and end."""
        with self._wake:
            self._draining = True
            self._wake.notify()
        end = monotonic() + grace
        while self.alive and self._unfinished and monotonic() < end:
            threading.Event().wait(0.02)
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self.alive:
            self._thread.join(_LAST_CALL_SECONDS)
        if self.alive:
            log.error("the engine has not come back from its last call")

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        faults = 0
        while self._waits_for_work():
            try:
                self._turn()
                faults, self._failing = 0, False
            except Exception as error:  # a fault of ours: no request may wait for ever for it
                log.exception("the scheduler failed; it goes on")
                self.load.faults += 1
                faults += 1
                if faults >= _MOST_FAULTS:
                    self._failing = True
                    self._end_all(error)
        with self._wake:
            self._draining = True
        self._end_all(Draining("the server has ended"))
        self.prompts.clear()

    def _waits_for_work(self) -> bool:
        """Wait for a request; False when the scheduler is to end."""
        with self._wake:
            while not (self._stopped or self._waiting or self._running):
                self._wake.wait()
            return not self._stopped

    def _turn(self) -> None:
        """One call of the engine, and all that comes before and after it."""
        self._end_unwanted()
        self._admit()
        if self._running:
            self._execute(list(self._batcher.blocks(self._running, self._end)))

    def _end_all(self, error: Exception) -> None:
        with self._wake:
            left = [*self._running, *self._waiting]
            self._waiting.clear()
        for ticket in left:
            self._end(ticket, error)

    def _end_unwanted(self) -> None:
        """End what was cancelled, or has taken too long."""
        with self._wake:
            unwanted = [ticket for ticket in self._waiting if ticket.unwanted]
        for ticket in [*unwanted, *(each for each in self._running if each.unwanted)]:
            late = not ticket.cancelled
            self._end(ticket, TimedOut("the request took longer than it may") if late else None)

    def _admit(self) -> None:
        """Admit those who wait, in their order, as long as there is room.

        A request whose prefix another one is prefilling waits for it, and is passed by others.
        """
        for ticket in list(self._waiting):
            if len(self._running) >= self._most_running:
                return
            try:
                if ticket.cached and ticket.stream is None:
                    prompt = np.array(ticket.tokens, np.int64)
                    if self.prompts.awaited(prompt, ticket.salt) >= _WORTH_WAITING:
                        continue
                begun = self.admission.admit(ticket, self._running)
            except Exception as error:  # whatever it is, it is this request's
                self._end(ticket, error)
                continue
            if begun is None:
                return
            self._begin(ticket, begun)

    def _begin(self, ticket: Ticket, begun: Begun) -> None:
        """Begin with a request that is admitted, or go on with it where it was preempted."""
        memory = begun.memory if ticket.memory is None else ticket.memory
        ticket.begun = Begun(begun.slots, memory)
        try:
            if ticket.cached:
                self.prompts.show(np.array(ticket.tokens, np.int64), ticket.begun, ticket.salt)
            if ticket.stream is None:
                ticket.stream = self.model.begin(
                    ticket.tokens,
                    ticket.request,
                    begun.slots,
                    ticket.submitted,
                    end=lambda _: None,
                    memory=begun.memory,
                    shared=True,
                    fault=lambda drafter, error: self._silenced(ticket, drafter, error),
                )
            else:
                ticket.stream.restart(begun.slots)
        except Exception as error:
            self._end(ticket, error)
            return
        with self._wake:
            self._waiting.remove(ticket)
            self._running.append(ticket)
            self._count()

    def _execute(self, work: Sequence[tuple[Ticket, Work]]) -> None:
        """Run blocks in one call, and accept its rows; alone where the call of all fails."""
        while work := [(ticket, pair) for ticket, pair in work if ticket in self._running]:
            try:
                steps = self._step([pair for _, pair in work])
            except Exception as error:
                if isinstance(error, CacheFull) and self._frees_slots(work):
                    continue
                if len(work) == 1:
                    self._end(work[0][0], error)
                    return
                for each in work:
                    self._execute([each])
                return
            for (ticket, _), step in zip(work, steps, strict=True):
                self._deliver(ticket, step)
            return

    def _frees_slots(self, work: Sequence[tuple[Ticket, Work]]) -> bool:
        """Whether slots were short for a call, and some were taken from others."""
        rows = sum(len(block.tokens) for _, (_, block) in work)
        short = self.admission.short(rows, len(work))
        return short and (self.prompts.evict() or self._preempt())

    def _step(self, work: Sequence[Work]) -> list[Step | Exception]:
        """Run the blocks in one call of the engine; see `run_step`."""
        self._began = started = perf_counter()
        rows = sum(len(block.tokens) for _, block in work)

        def observe(result: StepResult) -> None:
            self._began = None
            if len(work) > 1:
                self._batcher.cost.learn(len(work), rows, result.seconds)
            self.load.rows += rows
            self.load.calls += 1
            self.load.call_seconds += perf_counter() - started

        try:
            return run_step(self.model.engine, work, observe)
        finally:
            self._began = None

    def _deliver(self, ticket: Ticket, step: Step | Exception) -> None:
        """Send a request what its step brought, and end it where it has ended."""
        if isinstance(step, Exception):
            self._end(ticket, step)
            return
        stream = ticket.stream
        assert stream is not None
        if step.tokens or step.text:
            new = stream.logprobs[ticket.told :]
            ticket.told += len(new)
            self._tell(ticket, Progress(step, new))
        if stream.finished:
            self._end(ticket, None)

    def _preempt(self) -> bool:
        """Take the KV of the youngest of several requests; False where there is one alone.

        It waits before all others. Its prompt's KV goes to the prefix cache, where it is found
        again, or evicted. An answer that had begun goes on; a prefill begins anew.
        """
        if len(self._running) < 2:
            return False
        ticket = max(self._running, key=lambda each: each.submitted)
        stream, begun = ticket.stream, ticket.begun
        assert stream is not None
        assert begun is not None
        try:
            if stream.prefilling:
                stream.close()
                ticket.stream = None
            else:
                ticket.memory = begun.memory
                begun = Begun(begun.slots, begun.memory.beginning(len(ticket.tokens)))
        except Exception as error:
            self._end(ticket, error)
            return True
        ticket.begun = None
        self._release(ticket, begun, ticket.tokens if ticket.cached else None)
        with self._wake:
            self._running.remove(ticket)
            self._waiting.appendleft(ticket)
            self._count()
        self.load.preempted += 1
        return True

    def _silenced(self, ticket: Ticket, drafter: str, error: Exception) -> None:
        """Count a drafter that failed; what it remembers is not for those after it."""
        log.warning("drafter %s is silenced for a request: %s", drafter, type(error).__name__)
        self.load.silenced[drafter] += 1
        ticket.spoilt = True

    def _end(self, ticket: Ticket, error: Exception | None) -> None:
        """End a request: its KV goes to the prefix cache, and its listener gets the event."""
        with self._wake:
            if ticket.ended:
                return
            ticket.ended = True
            if ticket in self._running:
                self._running.remove(ticket)
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._count()
            self._unfinished -= 1
        stream, begun, ticket.begun = ticket.stream, ticket.begun, None
        result: Result | None = None
        tokens: Sequence[int] | None = None
        if stream is not None:
            try:
                stream.close()
                result, tokens = stream.result, stream.tokens
            except Exception as failed:
                error = error or failed
        if begun is not None:
            self._release(ticket, begun, None if error or not ticket.cached else tokens)
        if error is not None:
            self.load.failed += 1
            self._tell(ticket, Failed(error))
        elif result is not None:
            self._tell(ticket, Done(result))

    def _release(self, ticket: Ticket, begun: Begun, tokens: Sequence[int] | None) -> None:
        """Give KV to the prefix cache as that of `tokens`, or with None back to the engine.

        Whatever fails, no slot is lost.
        """
        try:
            self.prompts.hide(begun)
            if tokens is not None:
                if ticket.spoilt:
                    begun.memory.clear()
                self.prompts.keep(np.array(tokens, np.int64), begun, ticket.salt)
                return
        except Exception:
            log.exception("the KV of a request cannot be kept")
            self.load.faults += 1
        release(begun.slots)

    def _count(self) -> None:
        self.load.waiting, self.load.running = len(self._waiting), len(self._running)

    def _tell(self, ticket: Ticket, event: Event) -> None:
        with suppress(Exception):  # a listener that fails is the only one who wants the event
            ticket.listener(event)
