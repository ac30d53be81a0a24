"""Drafting ahead with MLX twice: a target, and beside it a slow drafter in a thread of its own.

On a Mac the drafter's device would be another one, as the Neural Engine with a Core ML model
(`ahead:model:NAME@coreml`). Here both are the CPU, each thread has a stream of its own, and the
other device's slowness is made up.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest

import paceline
from paceline.decoding.costs import CostTable
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.drafters import DraftModel
from paceline.drafters.ahead import AheadDrafter
from paceline.drafters.model import ModelDrafter
from paceline.engines import EngineSettings
from support import mlx
from support.driver import generation, run

pytestmark = pytest.mark.mlx

PROMPT = [5, 9, 30, 31, 5, 9, 30]
Times = list[tuple[float, float]]


class Timed:
    """An engine that says when it was at work; each call takes some time more."""

    def __init__(self, engine: Any, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds
        self.times: Times = []
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, work: Sequence[Any]) -> Any:
        started = perf_counter()
        result = self._engine.step(work)
        sleep(self._seconds)
        self.times.append((started, perf_counter()))
        self.threads.add(threading.current_thread().name)
        return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlx.checkpoint(tmp_path_factory.mktemp("ahead") / "llama", "llama")


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[Any, Any]:
    """A target, and the same model once more to draft with."""
    from paceline_mlx.engine import MlxEngine

    target = MlxEngine(folder, mlx.CONTEXT, EngineSettings())
    return target, MlxEngine(folder, mlx.CONTEXT, EngineSettings(min_rows=1))


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="beside") as pool:
        yield pool


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_slow_drafter_works_while_the_target_does(
    temperature: float, engines: tuple[Any, Any], worker: ThreadPoolExecutor
):
    target, small = Timed(engines[0], 0.02), Timed(engines[1], 0.004)
    settings: dict[str, Any] = {
        "stopping": Stopping(max_tokens=32),
        "sampling": Sampling(temperature=temperature, seed=3),
    }
    plain = run(engines[0], [generation(engines[0], PROMPT, **settings)])[0].tokens
    ahead = AheadDrafter(ModelDrafter(DraftModel(small, CostTable({1: 0.004}), 0.0)), worker)
    request = generation(target, PROMPT, drafters=[ahead], policy=Fixed(4), **settings)
    assert run(target, [request])[0].tokens == plain
    assert small.threads == {"beside_0"}
    assert request.counters.accepted > 0
    # A draft was begun before the call of the target that it was made beside had ended.
    beside = [time for time in small.times if any(_inside(time, call) for call in target.times)]
    assert beside
    if not temperature:  # the same model: all stands, and what was drafted ahead is what came
        assert ahead.used >= 6


def test_it_is_asked_for_by_name(folder: Path, cache: Path):
    model = paceline.load(folder, engine="mlx", cache_tokens=1024)
    settings: dict[str, Any] = {"raw": True, "max_tokens": 16, "max_block": 4}
    plain = model.generate("abcabcabc", drafter="none", **settings)
    drafted = model.generate(
        "abcabcabc", drafter=f"ahead:model:{folder}@mlx", policy="fixed", **settings
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0


def _inside(draft: tuple[float, float], call: tuple[float, float]) -> bool:
    return call[0] < draft[0] < call[1]
