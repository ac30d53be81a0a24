"""The queue of grammars that wait to be compiled, one after the other.

Independent of how they are compiled. A grammar is first tried for a short time, which is enough for
nearly all; one that takes longer waits until its client has no other that was tried less often:

    arrives    harmful 1, harmful 2, harmful 3, good
    compiles   0.03 s of harmful 1 to 3, good, 0.2 s of harmful 1 to 3, 1 s of harmful 1, ...

Invariants: clients take turns, so one that has few grammars here waits for at most one of
every other client's; and what no caller waits for any more is not compiled, not even to its end.
"""

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from paceline.errors import Busy
from paceline.storage.processes import Interrupt, Interrupted

Compile = Callable[[str, float, Interrupt], str | None]
"""Compiles a grammar within CPU seconds: "", or why it cannot be compiled; None: it takes longer,
which is not so after the last trial.

Raises Interrupted, and errors that are not of the grammar.
"""


class Caller:
    """A request that waits for grammars. As a context it leaves at the end. Thread-safe."""

    def __init__(
        self,
        client: Hashable = None,
        seconds: float = math.inf,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Wait at most some seconds, from now on. `client`: whose request it is."""
        self.client = client
        self._clock, self._deadline = clock, clock() + seconds
        self._woken = threading.Event()
        self._has_left = False

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Wait no longer, in whichever thread: the client is gone."""
        self._has_left = True
        self._woken.set()

    def wait(self, is_done: Callable[[], bool], *, patient: bool) -> None:
        """Wait until something is done, or the caller leaves, or (not `patient`) its time is up."""
        while not (is_done() or self._has_left):
            left = math.inf if patient else self._deadline - self._clock()
            if left <= 0:
                return
            self._woken.wait(min(left, threading.TIMEOUT_MAX))
            self._woken.clear()

    def wake(self) -> None:
        """Look again at what is waited for."""
        self._woken.set()


@dataclass(eq=False)
class _Job:
    """A grammar, and those that wait for it."""

    grammar: str
    number: int
    """In the order of arrival."""
    callers: list[Caller] = field(default_factory=list)
    trials: int = 0
    interrupt: Interrupt = field(default_factory=Interrupt)
    outcome: str | Exception | None = None


class CompileQueue:
    """The grammars of all clients, compiled in a thread that ends with the last one."""

    def __init__(self, compile_: Compile, seconds: Callable[[], Sequence[float]]) -> None:
        """Compile with `compile_`; `seconds` are the limits of its trials of a grammar."""
        self._compile, self._seconds = compile_, seconds
        self._jobs: dict[str, _Job] = {}
        self._turns: dict[Hashable, int] = {}
        """Client -> number of its last turn; of clients that wait."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def compile(self, grammar: str, caller: Caller, *, patient: bool = False) -> str:
        """Wait until a grammar is compiled: "", or why it cannot be.

        Raises Busy if that is not before the caller's time is up (with `patient` it waits on), or
        if the caller has left; and errors of the compiler.
        """
        with self._lock:
            job = self._jobs.setdefault(grammar, _Job(grammar, next(self._numbers)))
            job.callers.append(caller)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
        try:
            caller.wait(lambda: job.outcome is not None, patient=patient)
        finally:
            with self._lock:
                job.callers.remove(caller)
                if not job.callers and job.outcome is None:
                    self._remove(job)
                    job.interrupt.request()
        if job.outcome is None:
            raise Busy("there was no time for this grammar beside others; try again later")
        if isinstance(job.outcome, Exception):
            raise job.outcome
        return job.outcome

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._next()
            outcome: str | Exception | None = None
            try:
                seconds = self._seconds()[job.trials]
                outcome = self._compile(job.grammar, seconds, job.interrupt)
            except Interrupted:
                continue
            except Exception as error:
                outcome = error
            with self._lock:
                job.trials += 1
                if outcome is None:
                    continue
                job.outcome = outcome
                self._remove(job)
                for caller in job.callers:
                    caller.wake()

    def _next(self) -> _Job:
        """The job whose turn it is, by client, then by trials, then by arrival."""

        def rank(waiting: tuple[_Job, Hashable]) -> Any:
            job, client = waiting
            return self._turns.get(client, 0), job.trials, job.number

        waiting = [(job, caller.client) for job in self._jobs.values() for caller in job.callers]
        job, client = min(waiting, key=rank)
        clients = {client for _, client in waiting}
        self._turns = {client: turn for client, turn in self._turns.items() if client in clients}
        self._turns[client] = next(self._numbers)
        return job

    def _remove(self, job: _Job) -> None:
        if self._jobs.get(job.grammar) is job:
            del self._jobs[job.grammar]
