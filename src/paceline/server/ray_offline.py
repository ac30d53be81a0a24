"""`paceline batch --ray`: the model in an actor on each machine of a Ray cluster.

Invariant: an actor or a node that dies loses no line. Another actor takes over its lines, and
a replacement starts as soon as the cluster has room.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from paceline.errors import InvalidRequest, MissingExtra, ModelError, pip_install
from paceline.options import Options
from paceline.server.offline import Line, Offline, Responder
from paceline.server.settings import Settings

_LINES = 16
"""Maximum lines in an actor's batch."""

_MAX_FAILURES = 5
"""Maximum consecutive actor failures."""


class Worker:
    """A loaded model in its own process."""

    def __init__(self, load: Callable[[], Any], settings: Settings, options: Options) -> None:
        """Load the model; `load` takes no arguments."""
        self._offline = Offline(load(), settings, options).__enter__()

    def identity(self) -> Mapping[str, str]:
        return self._offline.identity

    def faults(self, lines: Sequence[Line]) -> list[str | None]:
        return self._offline.faults(lines)

    async def answers(self, lines: Sequence[Line]) -> list[dict[str, Any]]:
        machine = self._offline.machine
        return [answer | {"machine": machine} async for answer in self._offline.responses(lines)]


class RayOffline(Responder):
    """Works like `Offline`, with one actor per machine."""

    def __init__(
        self,
        address: str,
        cpus: int | None,
        load: Callable[[], Any],
        settings: Settings,
        options: Options,
    ) -> None:
        """Connect to a cluster, or start a local one if `address` is `local`; wait for one model.

        `cpus` is the number per actor; None: all CPUs of the smallest machine. Raises MissingExtra
        without Ray, and ModelError if no actor can be started.
        """
        try:
            import ray
        except ImportError as error:
            raise MissingExtra(f"--ray needs Ray: {pip_install('ray')}") from error
        self._ray = ray
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ModelError(f"cannot reach a Ray cluster at {address}: {error}") from error
        nodes = [node for node in ray.nodes() if node["Alive"]]
        have = [int(node["Resources"].get("CPU", 0)) for node in nodes]
        if cpus and cpus > max(have, default=0):
            ray.shutdown()
            raise InvalidRequest(
                f"--cpus {cpus}: the largest machine of the cluster has {max(have, default=0)}"
            )
        each = cpus or max(min(filter(None, have), default=1), 1)
        kind: Any = ray.remote(Worker).options(num_cpus=each, scheduling_strategy="SPREAD")
        self._start: Callable[[], Any] = lambda: kind.remote(load, settings, options)
        self._workers = [self._start() for _ in range(max(sum(n // each for n in have), 1))]
        try:
            identity = ray.get(self._workers[0].identity.remote())
        except ray.exceptions.RayError as error:
            self.__exit__()
            raise ModelError(f"no actor can load the model: {_reason(error)}") from error
        super().__init__(identity, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def faults(self, lines: Sequence[Line]) -> list[str | None]:
        """Return why each line would be rejected, or None."""
        found: list[str | None] = self._ray.get(self._workers[0].faults.remote(lines))
        return found

    async def responses(self, lines: Sequence[Line]) -> AsyncIterator[dict[str, Any]]:
        """Yield the response of each line. Raises ModelError if actors keep dying."""
        ordered = iter(sorted(lines, key=lambda line: line.text))
        groups = deque[list[Line]]()
        while group := [*islice(ordered, _LINES)]:
            groups.append(group)
        running: dict[asyncio.Future[Any], tuple[Any, list[Line]]] = {}

        def ask(worker: Any, group: list[Line]) -> None:
            reference = worker.answers.remote(group) if group else worker.identity.remote()
            running[asyncio.wrap_future(reference.future())] = worker, group

        for worker in self._workers:
            ask(worker, [])  # answered once its model is loaded
        failures, errors = 0, self._ray.exceptions
        while groups or any(group for _, group in running.values()):
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                worker, group = running.pop(future)
                try:
                    found = future.result()
                except (errors.RayActorError, errors.ObjectLostError) as error:
                    failures += 1
                    if failures > _MAX_FAILURES:
                        raise ModelError(f"actors keep dying: {_reason(error)}") from error
                    if group:
                        groups.appendleft(group)
                    ask(self._start(), [])
                    continue
                if group:
                    failures = 0
                    for answer in found:
                        yield answer
                elif found != self.identity:
                    raise ModelError(
                        "a machine of the cluster has a different model than the first one"
                    )
                if groups:
                    ask(worker, groups.popleft())


def _reason(error: BaseException) -> str:
    """Return the last line of an error that has the traceback of another process."""
    return str(error).strip().splitlines()[-1].strip()
