"""Requests as the scheduler has them: what is submitted, and what its listener hears."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from paceline.decoding.generation import Step
from paceline.decoding.logprobs import TokenLogprob
from paceline.drafters import Memory
from paceline.errors import PacelineError
from paceline.runtime.options import Request
from paceline.runtime.result import Result
from paceline.runtime.stream import Stream
from paceline.server.prefix_cache import Begun


class QueueFull(PacelineError):
    """As many requests wait as may; the message says how many."""


class Draining(PacelineError):
    """The server is ending, and takes no more requests."""


class TimedOut(PacelineError):
    """A request took longer than it may."""


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of an answer."""

    step: Step
    logprobs: Sequence[TokenLogprob] = ()
    """Of the new tokens, where that was asked for."""


@dataclass(frozen=True, slots=True)
class Done:
    """An answer has ended, also by being cancelled."""

    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no answer, or no more of it."""

    error: Exception


Event = Progress | Done | Failed
Listener = Callable[[Event], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was submitted; its listener hears `Progress`, and once `Done` or `Failed`.

    Of one that is cancelled before its turn it hears nothing more.
    """

    tokens: Sequence[int]
    request: Request
    listener: Listener
    salt: str
    cached: bool
    deadline: float | None
    submitted: float = field(default_factory=perf_counter)
    cancelled: bool = False
    most_tokens: int = 0
    """Tokens that prompt and answer can have together."""
    begun: Begun | None = None
    """Its KV; None while it waits, before its turn or after it was preempted."""
    memory: Memory | None = None
    """What drafters know of its tokens, kept while it waits after it was preempted."""
    stream: Stream | None = None
    spoilt: bool = False
    """Whether a drafter failed: what drafters know of its tokens may be wrong."""
    ended: bool = False
    told: int = 0
    """Logprobs that the listener has."""

    @property
    def count(self) -> int:
        """Tokens of its prompt, and of its answer so far."""
        return len(self.tokens) if self.stream is None else self.stream.count

    @property
    def held(self) -> int:
        """KV slots that it holds."""
        begun = self.begun  # another thread may ask while the request is preempted
        return 0 if begun is None else begun.slots.length

    def cancel(self) -> None:
        """Nobody waits for it any more. It ends before the next call."""
        self.cancelled = True

    @property
    def unwanted(self) -> bool:
        """Whether it was cancelled, or has taken too long."""
        return self.cancelled or (self.deadline is not None and monotonic() > self.deadline)


@dataclass(slots=True)
class Load:
    """What is going on, and what went on since the start."""

    running: int = 0
    waiting: int = 0
    submitted: int = 0
    refused: int = 0
    failed: int = 0
    preempted: int = 0
    """Requests that gave their KV to older ones, each time."""
    silenced: Counter[str] = field(default_factory=Counter)
    """Drafters that failed, or took too long, by their names."""
    faults: int = 0
    """Errors that were no request's own."""
    calls: int = 0
    call_seconds: float = 0.0
    rows: int = 0
