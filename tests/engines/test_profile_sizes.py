"""Cost profiles of models of any size: first calls, few rounds, and profiles that are outdated.

Calls take made-up times, and the clock is theirs: nothing sleeps.
"""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.engines import profile
from paceline.engines.base import StepResult
from paceline.engines.profile import (
    ROWS,
    CostProfile,
    load_profile,
    mark_outdated,
    measure_profile,
    warm_up,
)
from paceline.engines.profile_watch import ProfileWatch
from paceline.storage.progress import Progress
from support.toy import ToyEngine

PACKING = 5.0
"""Seconds."""


class Timed(ToyEngine):
    """Each call takes `seconds(rows)` on a clock of its own; large weights are packed first.

    It has a compiled graph for up to 2, 8 and any number of rows, and each packs in its first call.
    """

    def __init__(self, seconds: Callable[[int], float], packing: float = 0.0, **more: Any) -> None:
        super().__init__(**{"context_length": 8192, "cache_blocks": 1024, "min_rows": 2, **more})
        self.now = 0.0
        self.calls: list[int] = []
        self._seconds, self._packing = seconds, packing
        self._packed: set[int] = set()

    def step(self, work: Any) -> StepResult:
        rows = sum(len(block.tokens) for _, block in work)
        graph = (rows > 2) + (rows > 8)
        took = self._seconds(rows) + self._packing * (graph not in self._packed)
        self._packed.add(graph)
        self.calls.append(rows)
        self.now += took
        return super().step(work)._replace(seconds=took)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timed]:
    def make(*arguments: Any, **more: Any) -> Timed:
        engine = Timed(*arguments, **more)
        monkeypatch.setattr(profile, "perf_counter", lambda: engine.now)
        monkeypatch.setattr("paceline.engines.invariance.perf_counter", lambda: engine.now)
        return engine

    return make


def milliseconds(rows: int) -> float:
    return 0.02 + 0.002 * rows


def test_the_first_calls_of_every_graph_are_in_no_profile(timed: Callable[..., Timed]):
    profile = measure_profile(timed(milliseconds, PACKING))
    assert profile.seconds == pytest.approx({rows: milliseconds(rows) for rows in ROWS})
    assert profile.deep_context > 0, "packing is not taken for a slow prefill"
    assert profile.deep_seconds == pytest.approx(profile.seconds)
    assert profile.rounds >= 3


def test_a_warm_up_calls_every_number_of_rows_that_fits_once(timed: Callable[..., Timed]):
    engine = timed(milliseconds, context_length=100, cache_blocks=2, block_size=8)
    free, reached = engine.free_slots, list[int]()
    warm_up(engine, (2, 8, 32), reached.append)
    assert engine.calls == [2, 8], "32 rows do not fit into 16 slots"
    assert reached == [1, 2, 3]
    assert engine.free_slots == free


@pytest.mark.parametrize(("call", "measured"), [(0.02, 10), (0.14, 6), (1.5, 4)])
def test_calls_that_take_long_are_timed_as_often_for_fewer_numbers_of_rows(
    call: float, measured: int, timed: Callable[..., Timed], tmp_path: Path
):
    profile = load_profile(timed(lambda rows: call + rows * 1e-3), "model", tmp_path)
    assert profile.rounds >= 3
    assert len(list(tmp_path.iterdir())) == 1
    assert (min(profile.seconds), max(profile.seconds), len(profile.seconds)) == (1, 32, measured)
    assert profile.cost(16) == pytest.approx(call + 0.016)
    assert profile.compared["block_length"].rows >= sum(ROWS), "every T is compared nevertheless"


def test_a_profile_of_too_few_rounds_is_used_and_not_kept(
    timed: Callable[..., Timed], tmp_path: Path
):
    engine, lines = timed(lambda _: 9.0), StringIO()
    profile = load_profile(engine, "model", tmp_path, progress=Progress(lines))
    messages = lines.getvalue().splitlines()
    assert profile.rounds == 2, "never one"
    assert profile.cost(8) == pytest.approx(9.0)
    assert [*tmp_path.iterdir()] == []
    assert len(messages) == 2
    assert "not kept" in messages[1]
    assert "timed 2 times, 3 are needed" in messages[1]
    steps = engine.steps
    load_profile(engine, "model", tmp_path)
    assert engine.steps > steps


def test_a_profile_that_is_outdated_is_measured_again_once(
    timed: Callable[..., Timed], tmp_path: Path
):
    engine, lines = timed(milliseconds), StringIO()
    assert not mark_outdated(engine, "model", tmp_path, "there is none")
    first = load_profile(engine, "model", tmp_path)
    assert mark_outdated(engine, "model", tmp_path, "calls are slow")
    assert not mark_outdated(engine, "model", tmp_path, "that is known")
    engine._seconds = lambda rows: 2 * milliseconds(rows)
    profile = load_profile(engine, "model", tmp_path, progress=Progress(lines))
    assert lines.getvalue() == "measuring this machine, again: calls are slow\n"
    assert profile.cost(8) == pytest.approx(2 * first.cost(8))
    steps = engine.steps
    assert load_profile(engine, "model", tmp_path) == profile
    assert engine.steps == steps


# -- the watch -----------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> ProfileWatch:
    measured = CostProfile({1: 0.1, 8: 0.2}, True, 0.0, 256, {1: 0.2, 8: 0.4}, 4096)
    return ProfileWatch(measured, clock)


def calls(count: int, factor: float, rows: int = 1, context: int = 256) -> list[Any]:
    seconds = {(1, 256): 0.1, (8, 256): 0.2, (1, 4096): 0.2, (8, 4096): 0.4}[rows, context]
    return [(rows, context, factor * seconds)] * count


def test_calls_as_fast_as_the_profile_are_no_deviation(watch: ProfileWatch):
    for rows, context in ((1, 256), (8, 256), (1, 4096), (8, 4096)):
        for factor in (0.6, 1.0, 1.7):
            assert watch.add(calls(500, factor, rows, context)) is None


def test_calls_far_faster_than_the_profile_are_noticed_after_a_hundred_or_so(watch: ProfileWatch):
    assert watch.add(calls(120, 0.01)) is None
    result = watch.add(calls(20, 0.01))
    assert result is not None
    assert "calls of 1 rows take 0.01 times" in result


def test_fast_calls_of_one_length_are_noticed_among_others(watch: ProfileWatch):
    mixed = [item for _ in range(200) for item in (*calls(1, 1.0), *calls(1, 0.3, 8, 4096))]
    result = watch.add(mixed)
    assert result is not None
    assert "calls of 8 rows take 0.3 times" in result


def test_a_few_fast_calls_are_no_deviation(watch: ProfileWatch):
    for _ in range(20):
        assert watch.add([*calls(10, 0.01), *calls(22, 1.0)]) is None


def test_a_loaded_machine_is_no_deviation_at_once(watch: ProfileWatch, clock: Clock):
    for _ in range(100):
        assert watch.add(calls(32, 3.0)) is None
        clock.now += 5.0
    for _ in range(100):  # one call in five is not held up
        assert watch.add([*calls(26, 3.0), *calls(6, 1.0)]) is None
        clock.now += 60.0


def test_calls_that_stay_slow_for_long_are_noticed(watch: ProfileWatch, clock: Clock):
    result = None
    for _ in range(41):
        result = watch.add(calls(32, 3.0))
        clock.now += 15.0
    assert result is not None
    assert "take 3 times" in result


def test_calls_that_the_profile_says_nothing_of_are_not_compared(watch: ProfileWatch):
    assert watch.add([(64, 256, 1e-6)] * 1000 + [(1, 100_000, 1e-6)] * 1000) is None
