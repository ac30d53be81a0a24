"""Pool of loaded models: loads on request, within number and memory limits, and unloads idle ones.

Independent of HTTP and of processes. Invariants: a model with unfinished requests is not unloaded;
an unloaded model is gone before another uses its memory; a request that waits for a model is
overtaken for at most `_OVERTAKING_SECONDS`; and a model that cannot be loaded fails only the
requests for that model.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from paceline.errors import InvalidRequest
from paceline.runtime.batching.request import Draining, QueueFull
from paceline.server.router.child import Child
from paceline.server.settings import Settings
from paceline.storage.files import megabytes
from paceline.system.machine import memory_bytes

_OVERTAKING_SECONDS = 20.0
"""How long requests for loaded models may overtake one that waits for a place. Without overtaking,
two models in alternating use would load for every request; without a limit, one might never."""


@dataclass(slots=True)
class _Place:
    """A model that is loaded, being loaded, or being unloaded."""

    task: asyncio.Future[Child]
    memory: int
    users: int = 0
    used: float = field(default_factory=monotonic)
    leaving: bool = False


class Pool:
    """The loaded models. For one event loop alone."""

    def __init__(self, load: Callable[[str], Awaitable[Child]], settings: Settings) -> None:
        self._load, self._settings = load, settings
        gigabytes = settings.memory
        self._max_memory = memory_bytes() if gigabytes is None else round(gigabytes * 1e9)
        self._places: dict[str, _Place] = {}
        self._changed = asyncio.Condition()
        self._waiting: list[float] = []
        """Times when requests began to wait for a place, in order."""
        self._closed = False
        self.loads = 0
        """Models loaded since the start."""
        self._tasks = set[asyncio.Task[None]]()

    @property
    def states(self) -> dict[str, str]:
        """Name -> `loading`, `loaded` or `unloading`; other models are not loaded."""
        return {name: _state(place) for name, place in self._places.items()}

    @property
    def loaded(self) -> dict[str, Child]:
        """Name -> model, for those that can answer now."""
        return {
            name: place.task.result()
            for name, place in self._places.items()
            if _state(place) == "loaded"
        }

    @asynccontextmanager
    async def use(self, name: str, memory: int) -> AsyncIterator[Child]:
        """Return a model, loaded first if necessary; it stays loaded until the context ends.

        Args:
            name: of the model.
            memory: bytes of memory that it needs.

        Raises:
            InvalidRequest: the model needs more memory than all models may have.
            QueueFull: too many requests are waiting.
            Draining: the pool was closed.
            PacelineError: the model cannot be loaded.
        """
        if memory > self._max_memory:
            raise InvalidRequest(
                f"{name} needs about {megabytes(memory)} of memory, and the limit for all models "
                f"is {megabytes(self._max_memory)} together"
            )
        place = await self._place(name, memory)
        try:
            # Another request may wait for the same model: loading continues if one leaves.
            yield await self._result(place)
        finally:
            place.users -= 1
            place.used = monotonic()
            self._unload_when_idle(place)
            await self._notify()

    async def close(self, grace: float) -> None:
        """Load nothing more, and unload all models after `grace` seconds, even if requests run.

        May be called again, with a shorter time.
        """
        self._closed = True
        await self._notify()
        for place in [*self._places.values()]:
            place.task.cancel()  # a model that is being loaded
            self._unload(place, grace)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _result(self, place: _Place) -> Child:
        try:
            return await asyncio.shield(place.task)
        except asyncio.CancelledError:
            if place.task.cancelled():
                raise _draining() from None
            raise

    async def _place(self, name: str, memory: int) -> _Place:
        """Return the place of a model, with one more user."""
        since = monotonic()
        waits = False
        try:
            async with self._changed:
                while True:
                    if self._closed:
                        raise _draining()
                    place = self._places.get(name)
                    overtaken = self._waiting[0] if self._waiting else since
                    if place is not None and not place.leaving:
                        if since <= overtaken or monotonic() - overtaken < _OVERTAKING_SECONDS:
                            place.users += 1
                            return place
                    elif place is None and self._has_room(memory):
                        place = self._begin(name, memory)
                        place.users += 1
                        return place
                    if not waits:
                        if len(self._waiting) >= self._settings.queue:
                            raise QueueFull(
                                f"{len(self._waiting)} requests are already waiting for a model"
                            )
                        self._waiting.append(since)
                        waits = True
                    await self._changed.wait()
        finally:
            if waits:
                self._waiting.remove(since)
                await self._notify()

    def _has_room(self, memory: int) -> bool:
        """Return whether a model has room now; if not, begin to unload an idle one."""
        count = len(self._places)
        held = sum(place.memory for place in self._places.values())
        if count < self._settings.max_loaded_models and held + memory <= self._max_memory:
            return True
        if not any(place.leaving for place in self._places.values()):
            idle = [
                (place.used, name)
                for name, place in self._places.items()
                if not place.users and place.task.done()
            ]
            if idle:
                name = min(idle)[1]
                self._unload(self._places[name])
        return False

    def _begin(self, name: str, memory: int) -> _Place:
        place = _Place(asyncio.ensure_future(self._load(name)), memory)
        self._places[name] = place
        self.loads += 1
        self._spawn(self._watch(name, place))
        return place

    async def _watch(self, name: str, place: _Place) -> None:
        """Free the place of a model that could not be loaded, or has ended."""
        if child := await _child_of(place):
            await child.wait()
        self._places.pop(name, None)
        await self._notify()

    def _unload_when_idle(self, place: _Place) -> None:
        seconds = self._settings.keep_alive
        if seconds is None or place.users:
            return

        def check(used: float) -> None:
            if place.users or place.leaving or place.used != used:
                return  # used since, or gone
            if place.task.done():
                self._unload(place)
            else:  # all requests for it left before it was loaded
                self._unload_when_idle(place)

        asyncio.get_running_loop().call_later(seconds, check, place.used)

    def _unload(self, place: _Place, grace: float = math.inf) -> None:
        place.leaving = True

        async def unload() -> None:
            if child := await _child_of(place):
                await child.stop(grace)

        self._spawn(unload())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _child_of(place: _Place) -> Child | None:
    """Return the model of a place once it is loaded, or None if it could not be."""
    await asyncio.wait({place.task})
    loaded = not place.task.cancelled() and place.task.exception() is None
    return place.task.result() if loaded else None


def _state(place: _Place) -> str:
    if place.leaving:
        return "unloading"
    return "loaded" if place.task.done() else "loading"


def _draining() -> Draining:
    return Draining("the server is shutting down")
