"""The threads that read bodies and compile grammars, off the event loop.

Invariant: short bodies wait neither for long ones nor for grammars.
"""

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from time import monotonic
from typing import Any, TypeVar

from paceline.runtime.batching.request import Draining

_T = TypeVar("_T")

_SHORT_BYTES = 16 * 1024

_GRAMMARS = 256
"""Those that are compiled already wait for none of the others."""


class Lane(Enum):
    """Work that waits for its like alone; the value is the number of its threads."""

    # One thread: tokenizing a megabyte of text takes 100 MB, which a thread keeps. With eight
    # threads and such bodies the server grew by 720 MB for good.
    LONG = "long", 1
    SHORT = "short", 1
    GRAMMAR = "grammar", _GRAMMARS

    @classmethod
    def of(cls, body: bytes) -> "Lane":
        """The lane in which a body is parsed, and its prompt rendered and tokenized."""
        return cls.LONG if len(body) > _SHORT_BYTES else cls.SHORT


class Readers:
    """The threads of one server. Thread-safe."""

    def __init__(self) -> None:
        self._pools = {
            lane: ThreadPoolExecutor(lane.value[1], f"paceline-{lane.value[0]}-reader")
            for lane in Lane
        }
        self._started: dict[int, float] = {}
        self._numbers = itertools.count()

    async def run(self, lane: Lane, work: Callable[..., _T], *args: Any) -> _T:
        """Run in a thread of a lane; what waits there is dropped with its caller.

        Raises Draining after `close`.
        """
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._pools[lane], self._timed, work, *args)
        except RuntimeError:  # the threads have ended
            raise Draining("the server is shutting down and accepts no more requests") from None
        return await future

    @property
    def busy_seconds(self) -> float:
        """Seconds that the longest of the work in progress has taken so far."""
        now = monotonic()
        return now - min(self._started.copy().values(), default=now)

    def close(self) -> None:
        """Wait for the work in progress, and drop the rest."""
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _timed(self, work: Callable[..., _T], *args: Any) -> _T:
        number = next(self._numbers)
        self._started[number] = monotonic()
        try:
            return work(*args)
        finally:
            del self._started[number]
