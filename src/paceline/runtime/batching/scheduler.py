"""Continuous batching: the requests of many clients in the calls of one engine.

One thread drives the engine. Every call has a block of each decoding request, and as many prefill
rows as do not delay those (`batch.py`). Other threads submit requests; listeners get the events.

A request is admitted when the KV cache has slots for it (`admission.py`), and takes KV blocks as it
grows. When none is left, entries of the prefix cache are evicted, then the youngest request is
preempted: it returns to the queue and later continues to the same tokens.

Invariant: an error of one request ends that request alone, a drafter that fails is silenced, and no
slot is lost. Every call that concerns one request is made where its error ends that request. Other
errors are caught in `_run` and the loop continues: a block whose rows were not accepted is run
again.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import numpy as np

from paceline.decoding.types import Step
from paceline.errors import CacheFull, InvalidRequest
from paceline.runtime.batching.admission import Admission
from paceline.runtime.batching.batch import Batcher
from paceline.runtime.batching.prefix_cache import CachedPrefix, PrefixCache, close_sequence
from paceline.runtime.batching.prompt_store import PromptStore
from paceline.runtime.batching.request import (
    BatchRequest,
    Draining,
    Event,
    Listener,
    Load,
    QueueFull,
    TimedOut,
)
from paceline.runtime.pooled import Embedding, PooledStream
from paceline.runtime.result import Result
from paceline.runtime.stream import Stream, Work
from paceline.system.machine import release_memory

if TYPE_CHECKING:
    from paceline import Model

log = logging.getLogger(__name__)

_JOIN_SECONDS = 60.0  # that `close` waits for the engine call in progress
_REST_SECONDS = 5.0  # without a request, after which the engine rests

_MIN_PENDING = 32
"""Tokens of a prefix in another request's prefill for which a request waits in the queue."""

_MAX_FAULTS = 8
"""Consecutive errors that belong to no request after which all requests are failed."""


class Scheduler:
    def __init__(
        self,
        model: "Model",
        *,
        max_waiting: int = 256,
        max_running: int = 64,
        store: PromptStore | None = None,
        until_idle: bool = False,
    ) -> None:
        """Prepare; `start` starts the thread.

        Args:
            model: loaded, with the drafters that requests may use.
            max_waiting: requests in the queue.
            max_running: requests that run at once.
            store: keeps prompts on disk, too.
            until_idle: close with the last request, before its listener gets the result; the prefix
                cache is then empty.
        """
        self.model = model
        self.prefix_cache = PrefixCache(model.engine, store)
        self.admission = Admission(model.engine, self.prefix_cache, model.drafting.slots)
        self.load = Load()
        self.max_waiting, self._max_running = max_waiting, max_running
        self._until_idle = until_idle
        self._waiting: deque[BatchRequest] = deque()
        self._running: list[BatchRequest] = []
        self.unfinished = 0  # requests that were submitted and have not ended
        self._wake = threading.Condition()
        self.draining = False  # it accepts no more requests
        self.failing = False  # it failed all requests, and completed no iteration since
        self._stopped = self._rests = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self.batcher = Batcher(model.engine, model.costs.table(), self.load)

    def start(self) -> None:
        """Start the thread that drives the engine."""
        with self.model.lock:
            self.batcher.warm_up()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread that drives the engine runs."""
        return self._thread.is_alive()

    @property
    def usage(self) -> float:
        """Fraction of the slots that running requests hold, 0 to 1; shared slots count for each."""
        return self.admission.usage(list(self._running))

    def submit(self, queued: BatchRequest, listener: Listener) -> BatchRequest:
        """Put a request into the queue; returns it.

        The listener gets its events in the engine's thread, and must return quickly. Raises
        InvalidRequest if it can never be served, QueueFull, and Draining.
        """
        missing = self.model.drafting.taps(queued.request) - set(self.model.engine.taps)
        if missing:
            raise InvalidRequest(
                f"drafter {queued.request.drafter} needs hidden states that the model was loaded "
                "without; name it when loading, or start the server with it"
            )
        self.admission.limit(queued)
        queued.listener, queued.submitted = listener, perf_counter()
        with self._wake:
            if self.draining:
                raise Draining("the model is shutting down and accepts no more requests")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"{len(self._waiting)} requests wait already; try again later")
            self._waiting.append(queued)
            self.unfinished += 1
            self.load.submitted += 1
            self.load.waiting = len(self._waiting)
            self._wake.notify()
        return queued

    def close(self, grace: float = 0.0) -> None:
        """Accept no more requests, finish the submitted ones for up to `grace` seconds, and end."""
        with self._wake:
            self.draining = True
            self._wake.notify()
        end = monotonic() + grace
        while self.alive and self.unfinished and monotonic() < end:
            threading.Event().wait(0.02)
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self.alive:
            self._thread.join(_JOIN_SECONDS)
        if self.alive:
            log.error("the engine has not returned from its last call")

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        faults = 0
        while self._wait_for_work():
            try:
                with self.model.lock:
                    self._iterate()
                faults, self.failing = 0, False
            except Exception as error:  # no request may wait forever because of it
                log.exception("the scheduler failed and continues")
                self.load.faults += 1
                faults += 1
                if faults >= _MAX_FAULTS:
                    self.failing = True
                    with self.model.lock:
                        self._end_all(error)
        with self._wake:
            self.draining = True
        with self.model.lock:
            self._end_all(Draining("the model was shut down before the answer ended"))
            self.prefix_cache.clear()

    def _wait_for_work(self) -> bool:
        """Wait for a request, or once for a time without any; False once it is stopped."""
        with self._wake:
            if self._until_idle and not self.unfinished:
                self.draining = True
                return False
            self._rests = not self._wake.wait_for(
                lambda: self._stopped or self._waiting or self._running,
                None if self._rests else _REST_SECONDS,
            )
            return not self._stopped

    def _iterate(self) -> None:
        """Expire and admit requests, then make one call of the engine; or let it rest."""
        if self._rests:
            self.model.engine.rest()
            release_memory()
        self._end_expired()
        self._admit()
        if self._running:
            self._execute(list(self.batcher.next_batch(self._running, self._end)))

    def _end_all(self, error: Exception) -> None:
        with self._wake:
            left = [*self._running, *self._waiting]
            self._waiting.clear()
        for queued in left:
            self._end(queued, error)

    def _end_expired(self) -> None:
        """End requests that were cancelled, or exceeded their time limit."""
        with self._wake:
            unfinished = [*self._waiting, *self._running]
        for queued in unfinished:
            if queued.cancelled:
                self._end(queued, None)
            elif queued.late:
                self._end(queued, TimedOut("the request exceeded its time limit"))

    def _admit(self) -> None:
        """Admit requests in their order, while the KV cache has room.

        A request whose prefix is in another one's prefill waits for it; later requests overtake it.
        """
        for queued in list(self._waiting):
            if len(self._running) >= self._max_running:
                return
            try:
                if queued.cached and queued.stream is None:
                    pending = self.prefix_cache.pending_prefix(queued.prompt, queued.salt)
                    if pending >= _MIN_PENDING:
                        continue
                prefix = self.admission.admit(queued, self._running)
            except Exception as error:  # any error here is of this request
                self._end(queued, error)
                continue
            if prefix is None:
                return
            self._begin(queued, prefix)

    def _begin(self, queued: BatchRequest, prefix: CachedPrefix) -> None:
        """Start an admitted request, or continue it after a preemption."""
        memory = prefix.memory if queued.memory is None else queued.memory
        queued.prefix = CachedPrefix(prefix.sequence, memory)
        try:
            if queued.cached:
                prefix = self.prefix_cache.extend(prefix, queued.prompt, queued.salt)
                self.prefix_cache.register(queued.prompt, queued.prefix, queued.salt)
            if queued.pooling is not None:
                queued.stream = PooledStream(prefix.sequence, queued.tokens, queued.pooling)
            elif queued.stream is None:
                queued.stream = self.model._open_stream(
                    queued.tokens,
                    queued.request,
                    prefix.sequence,
                    queued.submitted,
                    end=lambda _: None,
                    memory=prefix.memory,
                    shared=True,
                    fault=lambda drafter, error: self._drafter_failed(queued, drafter, error),
                )
            elif isinstance(queued.stream, Stream):
                queued.stream.restart(prefix.sequence)
        except Exception as error:
            self._end(queued, error)
            return
        with self._wake:
            self._waiting.remove(queued)
            self._running.append(queued)
            self._update_load()

    def _execute(self, batch: Sequence[tuple[BatchRequest, Work]]) -> None:
        """Run a batch and accept its rows. If the call fails, run each request's block alone."""
        while batch := [(queued, work) for queued, work in batch if queued in self._running]:
            try:
                steps = self.batcher.run([work for _, work in batch])
            except Exception as error:
                if isinstance(error, CacheFull) and self._free_slots(batch):
                    continue
                if len(batch) == 1:
                    self._end(batch[0][0], error)
                    return
                for pair in batch:
                    self._execute([pair])
                return
            for (queued, _), step in zip(batch, steps, strict=True):
                self._deliver(queued, step)
            return

    def _free_slots(self, batch: Sequence[tuple[BatchRequest, Work]]) -> bool:
        """Evict or preempt if the call lacked slots; whether it may succeed now."""
        rows = sum(len(block.tokens) for _, (_, block) in batch)
        lacked = self.admission.lacks_slots(rows, len(batch))
        return lacked and (self.prefix_cache.evict() or self._preempt())

    def _deliver(self, queued: BatchRequest, step: Step | Exception) -> None:
        """Send a step to its listener, and end the request if its answer has ended."""
        if isinstance(step, Exception):
            self._end(queued, step)
            return
        stream = queued.stream
        assert stream is not None
        try:
            if step.tokens or step.text:
                self._send(queued, step)
            if stream.finished:
                self._end(queued, None)
        except Exception as error:
            self._end(queued, error)

    def _preempt(self) -> bool:
        """Preempt the youngest of several requests; False if only one runs.

        It returns to the head of the queue. The KV of its prompt goes to the prefix cache. A
        request in its prefill starts anew; an answer is recomputed and continues.
        """
        if len(self._running) < 2:
            return False
        queued = max(self._running, key=lambda running: running.submitted)
        stream, prefix = queued.stream, queued.prefix
        assert stream is not None
        assert prefix is not None
        tokens = queued.tokens
        try:
            if stream.prefilling:
                stream.close()
                queued.stream = None
            else:
                queued.memory = prefix.memory
                prefix = CachedPrefix(prefix.sequence, prefix.memory.copy_prefix(len(tokens)))
        except Exception as error:
            self._end(queued, error)
            return True
        queued.prefix = None
        self._release(queued, prefix, tokens)
        with self._wake:
            self._running.remove(queued)
            self._waiting.appendleft(queued)
            self._update_load()
        self.load.preempted += 1
        return True

    def _drafter_failed(self, queued: BatchRequest, drafter: str, error: Exception) -> None:
        log.warning("drafter %s is silenced for a request: %s", drafter, type(error).__name__)
        self.load.failed_drafters[drafter] += 1
        queued.drafter_failed = True

    def _end(self, queued: BatchRequest, error: Exception | None) -> None:
        """End a request: its KV goes to the prefix cache, and its listener gets the event."""
        with self._wake:
            if queued.ended:
                return
            queued.ended = True
            if queued in self._running:
                self._running.remove(queued)
            if queued in self._waiting:
                self._waiting.remove(queued)
            self._update_load()
            self.unfinished -= 1
        with suppress(Exception):  # its listener gets the event in any case
            self.load.count_cut(queued, error)
        stream, prefix, queued.prefix = queued.stream, queued.prefix, None
        result: Result | Embedding | None = None
        tokens: Sequence[int] | None = None
        if stream is not None:
            try:
                stream.close()
                result, tokens = stream.result, stream.tokens
            except Exception as failed:
                error = error or failed
        if prefix is not None:
            self._release(queued, prefix, None if error else tokens)
        if self._until_idle and not self.unfinished:
            self.prefix_cache.clear()
        if error is not None:
            self.load.failed += 1
            self._send(queued, error)
        elif result is not None:
            self._send(queued, result)

    def _release(
        self, queued: BatchRequest, prefix: CachedPrefix, tokens: Sequence[int] | None
    ) -> None:
        """Give KV to the prefix cache as that of `tokens`, or with None back to the engine.

        No slot is lost, whatever fails.
        """
        try:
            self.prefix_cache.unregister(prefix)
            if tokens is not None and queued.cached:
                if queued.drafter_failed:
                    prefix.memory.clear()
                array = np.array(tokens, np.int64)
                self.prefix_cache.insert(array, prefix, queued.salt)
                return
        except Exception:
            log.exception("cannot keep the KV of a request")
            self.load.faults += 1
        close_sequence(prefix.sequence)

    def _update_load(self) -> None:
        self.load.waiting, self.load.running = len(self._waiting), len(self._running)

    def _send(self, queued: BatchRequest, event: Event) -> None:
        with suppress(Exception):  # only the listener itself misses the event
            queued.listener(event)
