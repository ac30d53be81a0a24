"""Requests to the scheduler, the events that their listeners get, and counts of both."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from paceline.constraints.grammar import Grammars
from paceline.decoding.types import Constraint, FinishReason, Step
from paceline.drafters import DraftKV
from paceline.engines.base import KVSequence
from paceline.errors import PacelineError
from paceline.runtime.answer import Job
from paceline.runtime.batching.prefix_cache import CachedPrefix
from paceline.runtime.batching.prompt_store import Tokens
from paceline.runtime.decisions import Decisions
from paceline.runtime.embedding import Embedding
from paceline.runtime.request import Request
from paceline.runtime.result import Result, Stats

if TYPE_CHECKING:
    from paceline import Model


class QueueFull(PacelineError):
    """The queue has its maximum number of requests."""


class Draining(PacelineError):
    """The scheduler or the server is shutting down and accepts no more requests."""


class TimedOut(PacelineError):
    """A request exceeded its time limit."""


Event = Step | Result | Embedding | Decisions | Exception
"""The steps of an answer, then its result (also after a cancellation) or its error; or the result
of another job, whose cancellation has the result of an answer."""
Listener = Callable[[Event], None]


@dataclass(slots=True, eq=False, weakref_slot=True)
class BatchRequest:
    """One answer or other job to compute, with its state in the scheduler once it is submitted."""

    model: "Model"
    tokens: list[int]
    """The prompt."""
    request: Request
    salt: str = ""
    """Prompts share cached KV only under the same salt."""
    cached: bool = True
    """True if the prompt may use the prefix cache, and be added to it."""
    timeout: float | None = None  # in seconds, the queue included
    prefill_only: bool = False
    """True if only the prompt is computed: the client gets no token of the answer."""
    index: int = 0  # among the answers to its prompt
    open_job: Callable[[KVSequence, Callable[[], None]], Job] | None = None
    """Opens a job other than an answer, on a sequence with a prefix of the prompt; the function
    given to it frees the slots of idle KV."""
    constraint: Callable[[Grammars], Constraint | None] | None = None
    """Compiles the constraint of the answer, which may take seconds."""
    started: float = field(default_factory=perf_counter)
    """Time of the caller's request (`perf_counter`)."""
    is_paused: Callable[[], bool] = lambda: False
    """Returns whether its reader has enough unread events, so that it need not run for now."""

    # Set by the scheduler:
    listener: Listener = field(default=lambda _: None, init=False)
    wake: Callable[[], None] = field(default=lambda: None, init=False)
    """Wakes the scheduler, which may wait because all requests are paused."""
    submitted: float = field(default=0.0, init=False)  # `perf_counter`
    cancelled: bool = field(default=False, init=False)
    prefix: CachedPrefix | None = field(default=None, init=False)
    """Its KV; None in the queue, before it is admitted or after it was preempted."""
    memory: DraftKV | None = field(default=None, init=False)
    """The drafters' state of its tokens, saved in the queue after a preemption."""
    job: Job | None = field(default=None, init=False)
    """None in the queue before it is admitted, and after a preemption in its prefill."""
    drafter_failed: bool = field(default=False, init=False)
    """True if a drafter failed: the drafters' state of its tokens may be wrong."""
    ended: bool = field(default=False, init=False)

    def compiled(self, grammars: Grammars) -> "BatchRequest":
        """Compile the request's constraint. Raises InvalidRequest if that is not possible."""
        if self.constraint is None:
            return self
        request = replace(self.request, constraint=self.constraint(grammars))
        return replace(self, request=request, constraint=None)

    @property
    def prompt(self) -> Tokens:
        return np.array(self.tokens, np.int64)

    @property
    def max_length(self) -> int:
        """The maximum tokens of prompt and answer together."""
        return len(self.tokens) + (self.request.max_tokens or 0)

    @property
    def count(self) -> int:
        """The number of tokens of the prompt and of the answer so far."""
        return len(self.tokens) if self.job is None else self.job.count

    @property
    def slots(self) -> int:
        prefix = self.prefix  # another thread may read it during a preemption
        return 0 if prefix is None else prefix.sequence.length

    def cancel(self) -> None:
        """End it before the next forward pass."""
        self.cancelled = True
        self.wake()

    def empty_result(self) -> Result:
        """Return the result of a request that was cancelled before its answer began."""
        return Result(
            text="",
            token_ids=[],
            finish_reason=FinishReason.CANCELLED,
            stats=Stats(load_seconds=self.model.load_seconds),
            prompt_tokens=len(self.tokens),
            model=self.model.files.name,
            engine=self.model.files.engine,  # the model may be closed
            drafter=str(self.request.drafter),
            policy=self.request.policy,
            exact=False,
            seed=self.request.sampling.seed,
            settings=self.request.settings,
        )

    @property
    def is_late(self) -> bool:
        return self.timeout is not None and perf_counter() > self.submitted + self.timeout

    @property
    def is_ready(self) -> bool:
        """True if the scheduler has work to do for it."""
        return self.cancelled or self.is_late or not self.is_paused()


@dataclass(slots=True)
class Load:
    """Current load, and counters since the start."""

    running: int = 0
    waiting: int = 0
    submitted: int = 0
    failed: int = 0
    preempted: int = 0  # a request may be preempted several times
    failed_drafters: Counter[str] = field(default_factory=Counter)
    """Drafter -> number of requests where it failed or exceeded its time limit."""
    cut: Counter[str] = field(default_factory=Counter)
    """Reason -> requests that ended before their answer did."""
    cut_tokens: Counter[str] = field(default_factory=Counter)
    """Reason -> tokens of their answers, which no client received to the end."""
    faults: int = 0  # errors that belong to no request
    calls: int = 0
    call_seconds: float = 0.0
    rows: int = 0

    def count_cut(self, queued: BatchRequest, error: Exception | None) -> None:
        """Count a request that ends, if it ends before its answer."""
        reasons = {TimedOut: "timeout", Draining: "draining", type(None): "cancelled"}
        reason = reasons.get(type(error))
        job = queued.job
        if reason is not None and (job is None or not job.finished):
            self.cut[reason] += 1
            self.cut_tokens[reason] += queued.count - len(queued.tokens)
