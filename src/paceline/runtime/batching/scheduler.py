"""The single scheduling loop: runs all callers' requests in the forward passes of one engine.

One thread per loaded model drives its engine, from the first request until the model is closed or
freed. Other threads submit requests and read the events: a program's streams and lists, a chat, and
the clients of a server. Every forward pass has a block of each decoding request, and prefill rows
that do not delay those (`batch.py`). A request whose reader does not keep up is paused.

A request is admitted when the KV cache has slots for it (`admission.py`), and allocates KV blocks
as it grows. When none is left, entries of the prefix cache are evicted, then a request is
preempted, a paused one or else the youngest: it is queued and continues to the same tokens.

Invariant: an error of one request ends that request alone, a failing drafter is disabled, and no
slot is lost. Every function call for one request is made where its error ends that request. Other
errors are caught in `_loop` and the loop continues: a block whose rows were not accepted is run
again.
"""

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet, finalize, ref

import numpy as np

from paceline.decoding.types import Step
from paceline.errors import CacheFull, InvalidRequest
from paceline.runtime.answer import Work
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
from paceline.system.machine import release_memory
from paceline.system.processes import in_forked_child

if TYPE_CHECKING:
    from paceline import Model

log = logging.getLogger(__name__)

_JOIN_SECONDS = 60.0  # that `close` waits for the current forward pass
_REST_SECONDS = 5.0  # without a request, before the engine becomes idle

_MIN_PENDING = 32
"""Minimum tokens of a prefix in another request's prefill that make a request wait in the queue."""

_MAX_FAULTS = 8
"""Consecutive errors that belong to no request, before all requests are failed."""


_MAX_RUNNING = 64
_MAX_RUNNING_UNSHARED = 8
"""Limit for unshared forward passes: each brings another sequence's KV into the CPU cache."""

_T = TypeVar("_T")
_Outcome = tuple[Any, BaseException | None]


class Scheduler:
    """The queue of one engine, and the thread that drives it."""

    def __init__(
        self,
        model: "Model",
        *,
        max_waiting: int,
        max_running: int | None,
        store: PromptStore | None,
    ) -> None:
        """Prepare; `start` starts the thread, which ends when the model is freed.

        Args:
            model: the loaded model.
            max_waiting: maximum number of requests in the queue.
            max_running: maximum number that run at once; None: the engine's default.
            store: also stores prompts on disk.
        """
        self.engine = engine = model.engine
        self.prefix_cache = PrefixCache(engine, store)
        self.admission = Admission(engine, self.prefix_cache)
        self.load = Load()
        self.max_waiting = max_waiting
        self._max_running = max_running or (
            _MAX_RUNNING if engine.shares_calls else _MAX_RUNNING_UNSHARED
        )
        self._waiting: deque[BatchRequest] = deque()
        self._running: list[BatchRequest] = []
        self._calls: list[tuple[Callable[[], Any], SimpleQueue[_Outcome]]] = []
        # Callers lock this, and not the condition: Ctrl-C in its `__enter__` would leave it locked.
        # All waiters are notified: Ctrl-C in `notify` can leave a stale waiter behind.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self.draining = False  # it accepts no more requests
        self.failing = False  # it failed all requests, and completed no iteration since
        self._stopped = self._rests = self._process_ends = False
        self._ended = False  # Python no longer knows that a thread runs if Ctrl-C ends a `join`
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self.batcher = Batcher(engine, model.costs.table(), self.load)
        self._when_freed = finalize(model, self._stop)
        self._when_freed.atexit = False  # at exit, `_close_all` also waits
        _all.add(self)

    def start(self, *, warm_up: bool = False) -> None:
        if warm_up:
            self.batcher.warm_up()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread that drives the engine runs."""
        return self._thread.ident is not None and not self._ended

    @property
    def unfinished(self) -> int:
        """The number of requests that were submitted and have not ended."""
        return len(self._requests())

    @property
    def usage(self) -> float:
        """The fraction of slots that running requests hold, 0 to 1; shared slots count for each."""
        return self.admission.usage(list(self._running))

    def submit(self, queued: BatchRequest, listener: Listener) -> BatchRequest:
        """Put a request into the queue, and return it.

        The listener gets its events in the engine's thread, and must return quickly. Raises
        InvalidRequest if it can never be served, QueueFull, and Draining.
        """
        missing = queued.model.drafting.taps(queued.request) - set(self.engine.taps)
        if missing:
            raise InvalidRequest(
                f"drafter {queued.request.drafter} needs hidden states that the model was loaded "
                "without; name it when loading, or start the server with it"
            )
        self.admission.limit(queued)
        queued.listener, queued.wake = listener, self.wake
        queued.submitted = perf_counter()
        with self._lock:
            if self.draining:
                raise Draining("the model is shutting down and accepts no more requests")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(
                    f"{len(self._waiting)} requests are already waiting; try again later"
                )
            self._waiting.append(queued)
            self.load.submitted += 1
            self.load.waiting = len(self._waiting)
            self._wake.notify_all()
        return queued

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function in the engine's thread, between forward passes, and return its result.

        Measurements use the engine this way. Raises the function's errors, and Draining.
        """
        if threading.get_ident() == self._thread.ident:
            return function()
        call = function, SimpleQueue[_Outcome]()
        with self._lock:
            if self.draining:
                raise Draining("the model is shutting down")
            self._calls.append(call)
            self._wake.notify_all()
        try:
            result, error = call[1].get()
        except BaseException:
            with self._lock, suppress(ValueError):  # else it has begun
                self._calls.remove(call)
            raise
        if error is not None:
            raise error
        return cast("_T", result)

    def wake(self) -> None:
        """Let the thread check for work again."""
        if not in_forked_child():  # the copied lock may still be held there
            with self._lock:
                self._wake.notify_all()

    def cancel_all(self) -> None:
        """Cancel all requests: each ends with the answer so far."""
        with self._lock:
            for queued in self._requests():
                queued.cancelled = True
            self._wake.notify_all()

    def close(self, grace: float = 0.0) -> None:
        """Accept no more requests, finish the submitted ones for up to `grace` seconds, and end."""
        with self._lock:
            self.draining = True
            self._wake.notify_all()
        end = monotonic() + grace
        while self.alive and self.unfinished and monotonic() < end:
            sleep(0.02)
        self._stop()
        end = monotonic() + _JOIN_SECONDS
        while self.alive and monotonic() < end:
            sleep(0.005)
        self._when_freed.detach()  # it refers to the engine
        if self.alive:
            log.error("the engine has not returned from its last forward pass")

    def _stop(self) -> None:
        if not in_forked_child():
            with self._lock:
                self.draining = self._stopped = True
                self._wake.notify_all()

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            self._ended = True

    def _loop(self) -> None:
        faults = 0
        while not self._stopped:
            try:
                self._wait_for_work()
                if not self._stopped:
                    self._iterate()
                faults, self.failing = 0, False
            except Exception as error:  # no request may wait forever because of it
                log.exception("the scheduler failed and continues")
                self.load.faults += 1
                faults += 1
                if faults >= _MAX_FAULTS:
                    self.failing = True
                    self._end_all(error)
        self._end_all(Draining("the model was shut down before the answer ended"))
        for _, outcome in self._take_calls():
            outcome.put((None, Draining("the model was shut down")))
        self.prefix_cache.close()

    def _wait_for_work(self) -> None:
        """Wait for work or the end; after a time without either, let the engine idle once."""
        with self._lock:
            self._rests = not self._wake.wait_for(
                lambda: self._stopped or self._has_work(), None if self._rests else _REST_SECONDS
            )

    def _take_calls(self) -> list[tuple[Callable[[], Any], SimpleQueue[_Outcome]]]:
        with self._lock:
            calls, self._calls = self._calls, []
        return calls

    def _requests(self) -> list[BatchRequest]:
        with self._lock:
            return [*self._waiting, *self._running]

    def _has_work(self) -> bool:
        return bool(self._calls) or any(queued.is_ready for queued in self._requests())

    def _iterate(self) -> None:
        """Expire and admit requests, then make one forward pass; or let the engine idle."""
        if self._rests:
            self.engine.rest()
            release_memory()
        for function, outcome in self._take_calls():
            try:
                outcome.put((function(), None))
            except BaseException as error:
                outcome.put((None, error))
        self._end_expired()
        self._admit()
        if self._running:
            self._execute(list(self.batcher.next_batch(self._running, self._end)))

    def _end_all(self, error: Exception) -> None:
        for queued in self._requests():
            self._end(queued, None if queued.cancelled else error)

    def _end_expired(self) -> None:
        for queued in self._requests():
            if queued.cancelled:
                self._end(queued, None)
            elif queued.is_late:
                self._end(queued, TimedOut("the request exceeded its time limit"))

    def _admit(self) -> None:
        """Admit requests in their order, while the KV cache has free slots.

        A request whose prefix is in another one's prefill waits for it; later requests overtake it.
        """
        for queued in list(self._waiting):
            if not queued.is_ready:
                continue  # it was preempted, and its reader is still behind
            active = [running for running in self._running if not running.is_paused()]
            if len(active) >= self._max_running:
                return
            try:
                if queued.cached and queued.job is None:
                    pending = self.prefix_cache.pending_prefix(queued.prompt, queued.salt)
                    if pending >= _MIN_PENDING:
                        continue
                prefix = self.admission.admit(queued, self._running)
                while prefix is None and self._preempt(paused=True):
                    prefix = self.admission.admit(queued, self._running)
            except Exception as error:  # any such error belongs to this request
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
            if queued.job is not None:
                queued.job.restart(prefix.sequence)
            elif queued.open_job is not None:
                queued.job = queued.open_job(prefix.sequence, self.prefix_cache.clear)
            else:
                fault = partial(self._drafter_failed, ref(queued))
                open_answer = queued.model._open_answer
                queued.job = open_answer(queued, prefix, fault, self.prefix_cache.clear)
        except Exception as error:
            self._end(queued, error)
            return
        with self._lock:
            self._waiting.remove(queued)
            self._running.append(queued)
            self._update_load()

    def _execute(self, batch: Sequence[tuple[BatchRequest, Work]]) -> None:
        """Run a batch and accept its rows. If the pass fails, run each request's block alone."""
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
        """Evict or preempt if the forward pass lacked slots; return whether it may succeed now."""
        rows = sum(len(block.tokens) for _, (_, block) in batch)
        lacked = self.admission.lacks_slots(rows, len(batch))
        return lacked and (self.prefix_cache.evict() or self._preempt())

    def _deliver(self, queued: BatchRequest, step: Step | Exception) -> None:
        """Send a step to its listener, and end the request if its answer has ended."""
        if isinstance(step, Exception):
            self._end(queued, step)
            return
        assert queued.job is not None
        try:
            if step.tokens or step.text or step.reasoning:
                self._send(queued, step)
            if queued.job.finished:
                self._end(queued, None)
        except Exception as error:
            self._end(queued, error)

    def _preempt(self, *, paused: bool = False) -> bool:
        """Preempt a request, a paused one if there is one, else the youngest of several.

        It returns to the head of the queue. The KV of its prompt goes to the prefix cache. A
        request in its prefill starts over; an answer is recomputed and continues.

        Returns:
            True if one was preempted; with `paused`, only a paused one is.
        """
        candidates = [queued for queued in self._running if queued.is_paused()]
        if not candidates and not paused and len(self._running) > 1:
            candidates = self._running
        if not candidates:
            return False
        queued = max(candidates, key=lambda running: running.submitted)
        job, prefix = queued.job, queued.prefix
        assert job is not None
        assert prefix is not None
        tokens = queued.tokens
        try:
            if job.prefilling:
                job.close()
                queued.job = None
            else:
                queued.memory = prefix.memory
                prefix = CachedPrefix(prefix.sequence, prefix.memory.copy_prefix(len(tokens)))
        except Exception as error:
            self._end(queued, error)
            return True
        queued.prefix = None
        self._release(queued, prefix, tokens)
        with self._lock:
            self._running.remove(queued)
            self._waiting.appendleft(queued)
            self._update_load()
        self.load.preempted += 1
        return True

    def _drafter_failed(self, request: ref[BatchRequest], drafter: str, error: Exception) -> None:
        log.warning("drafter %s is disabled for a request: %s", drafter, type(error).__name__)
        self.load.failed_drafters[drafter] += 1
        if (queued := request()) is not None:  # a strong reference keeps it and its model alive
            queued.drafter_failed = True

    def _end(self, queued: BatchRequest, error: Exception | None) -> None:
        """End a request: its KV goes to the prefix cache, and its listener gets the event."""
        with self._lock:
            if queued.ended:
                return
            queued.ended = True
            if queued in self._running:
                self._running.remove(queued)
            if queued in self._waiting:
                self._waiting.remove(queued)
            self._update_load()
        with suppress(Exception):  # its listener gets the event in any case
            self.load.count_cut(queued, error)
        job, prefix, queued.prefix = queued.job, queued.prefix, None
        result: Event | None = None
        tokens: Sequence[int] | None = None
        if job is not None:
            job.failed = error is not None
            try:
                job.close()
                result, tokens = job.result, job.tokens
            except Exception as failed:
                error = error or failed
        if prefix is not None:
            self._release(queued, prefix, None if error else tokens)
        if error is not None:
            self.load.failed += 1
        self._send(queued, error or result or queued.empty_result())

    def _release(
        self, queued: BatchRequest, prefix: CachedPrefix, tokens: Sequence[int] | None
    ) -> None:
        """Give KV to the prefix cache as the KV of `tokens`, or with None back to the engine.

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
            if not self._process_ends:
                queued.listener(event)


_all = WeakSet[Scheduler]()


@atexit.register
def _close_all() -> None:
    """End all answers: a thread that is in the engine when the process ends would crash it.

    Only daemon threads are left to read the events, and would print any error.
    """
    for scheduler in [*_all]:
        if scheduler.alive and not in_forked_child():
            scheduler._process_ends = True
            scheduler.cancel_all()
            scheduler.close()
