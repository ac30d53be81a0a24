"""The pool of loaded models: limits, idle time, fairness, failures. Toy models without HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.errors import InvalidRequest, ModelError
from paceline.runtime.batching.request import Draining, QueueFull
from paceline.server.router import pool as pool_module
from paceline.server.router.pool import Pool
from paceline.server.settings import Settings
from support.errors import raises
from support.waiting import PATIENCE


class Toy:
    """A fake model, loaded until it is ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = asyncio.Event()
        self.grace: float | None = None

    async def wait(self) -> None:
        await self.ended.wait()

    async def stop(self, grace: float) -> None:
        self.grace = grace
        await asyncio.sleep(0)
        self.ended.set()


class Loader:
    """A loader of toys that records all loads."""

    def __init__(self) -> None:
        self.made: list[Toy] = []
        self.pools: list[Pool] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, name: str) -> Toy:
        await self.gate.wait()
        if name == "broken":
            raise ModelError("no such file")
        assert sum(not toy.ended.is_set() for toy in self.made) < self.most, "too many at once"
        self.made.append(Toy(name))
        return self.made[-1]

    most = 99

    @property
    def names(self) -> list[str]:
        return [toy.name for toy in self.made]

    def pool(self, **settings: Any) -> Pool:
        """A pool of toys, closed at the end of the test."""
        self.pools.append(Pool(self, Settings(**settings)))
        return self.pools[-1]


def runs(case: Callable[[Loader], Awaitable[None]]) -> Callable[[], None]:
    """A test of a loader in an event loop."""

    async def limited() -> None:
        loader = Loader()
        async with asyncio.timeout(PATIENCE):
            await case(loader)
            for pool in loader.pools:
                await pool.close(0)

    return lambda: asyncio.run(limited())


async def settle() -> None:
    """Run every task until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ask(pool: Pool, name: str, memory: int = 1) -> Toy:
    async with pool.use(name, memory) as toy:
        assert not toy.ended.is_set()
        return toy


@runs
async def test_a_model_is_loaded_once_for_concurrent_requests(loader: Loader):
    loader.gate.clear()
    pool = loader.pool()
    asked = [asyncio.ensure_future(ask(pool, "a")) for _ in range(5)]
    await settle()
    assert pool.states == {"a": "loading"}
    assert pool.loaded == {}
    loader.gate.set()
    assert len({*await asyncio.gather(*asked)}) == 1
    assert pool.states == {"a": "loaded"}
    assert pool.loads == 1


@runs
async def test_the_longest_idle_model_is_replaced(loader: Loader):
    loader.most = 2
    pool = loader.pool(max_loaded_models=2)
    for name in ("a", "b", "a", "c", "a", "b"):
        await ask(pool, name)
    assert loader.names == ["a", "b", "c", "b"]
    assert set(pool.states) == {"a", "b"}
    await pool.close(0)
    assert pool.states == {}


@runs
async def test_a_busy_model_is_not_unloaded(loader: Loader):
    loader.most = 1
    pool = loader.pool()
    async with pool.use("a", 1) as toy:
        other = asyncio.ensure_future(ask(pool, "b"))
        await settle()
        assert not toy.ended.is_set()
        assert not other.done()
    assert (await other).name == "b"
    assert toy.ended.is_set()


@runs
async def test_memory_also_limits_the_loaded_models(loader: Loader):
    pool = loader.pool(max_loaded_models=9, memory=10 / 1e9)
    await ask(pool, "a", 4)
    await ask(pool, "b", 4)
    assert set(pool.states) == {"a", "b"}
    await ask(pool, "c", 9)  # takes the place of both
    assert set(pool.states) == {"c"}
    with raises(InvalidRequest, "together"):
        await ask(pool, "d", 11)
    assert set(pool.states) == {"c"}


@runs
async def test_requests_for_a_loaded_model_overtake_only_for_a_while(loader: Loader):
    times = [0.0]
    pool = loader.pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "monotonic", lambda: times[-1])
        async with pool.use("a", 1):
            other = asyncio.ensure_future(ask(pool, "b"))
            await settle()
            times.append(1.0)
            await ask(pool, "a")  # overtakes
            times.append(1000.0)
            late = asyncio.ensure_future(ask(pool, "a"))
            await settle()
            assert not late.done()
        assert (await other).name == "b"
        await late
    assert loader.names == ["a", "b", "a"]


@runs
async def test_a_failed_load_fails_its_own_requests_and_can_be_retried(loader: Loader):
    pool = loader.pool(max_loaded_models=2)
    await ask(pool, "a")
    asked = [asyncio.ensure_future(ask(pool, "broken")) for _ in range(2)]
    for request in asked:
        with raises(ModelError):
            await request
    await settle()
    assert pool.states == {"a": "loaded"}
    with pytest.raises(ModelError):
        await ask(pool, "broken")


@runs
async def test_only_idle_models_are_unloaded(loader: Loader):
    pool = loader.pool(max_loaded_models=2, keep_alive=0.05)
    idle = await ask(pool, "a")
    async with pool.use("b", 1) as used:
        await idle.ended.wait()
        await asyncio.sleep(0.1)
        assert not used.ended.is_set()
    await used.ended.wait()
    await settle()
    assert pool.states == {}


@runs
async def test_a_model_without_waiting_requests_is_unloaded_when_idle(loader: Loader):
    loader.gate.clear()
    pool = loader.pool(keep_alive=0.02)
    asked = asyncio.ensure_future(ask(pool, "a"))
    await settle()
    asked.cancel()
    await asyncio.sleep(0.05)
    assert pool.states == {"a": "loading"}
    loader.gate.set()
    await settle()
    await loader.made[0].ended.wait()


@runs
async def test_a_client_that_leaves_the_queue_leaks_nothing(loader: Loader):
    pool = loader.pool(queue=1)
    async with pool.use("a", 1):
        gone = asyncio.ensure_future(ask(pool, "b"))
        await settle()
        with raises(QueueFull, "1 requests"):
            await ask(pool, "c")
        gone.cancel()
        await settle()
        waits = asyncio.ensure_future(ask(pool, "c"))
        await settle()
    assert (await waits).name == "c"
    assert loader.names == ["a", "c"]


@runs
async def test_closing_the_pool_ends_loaded_loading_and_queued_models(loader: Loader):
    pool = loader.pool(max_loaded_models=2)
    toy = await ask(pool, "a")
    loader.gate.clear()
    async with pool.use("a", 1):
        asked = [asyncio.ensure_future(ask(pool, name)) for name in ("b", "c")]
        await settle()
        assert pool.states == {"a": "loaded", "b": "loading"}
        await pool.close(7)
    assert toy.grace == 7
    assert pool.states == {}
    for request in asked:
        with pytest.raises(Draining):
            await request
    with pytest.raises(Draining):
        await ask(pool, "a")
