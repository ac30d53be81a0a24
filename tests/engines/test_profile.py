import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from paceline.engines.base import StepResult
from paceline.engines.profile import (
    ROWS,
    CostProfile,
    load_profile,
    measure_profile,
    stored_profiles,
)
from paceline.errors import CacheFull
from paceline.storage.progress import Progress
from support.toy import ToyEngine


class Drifting(ToyEngine):
    """The last row of a block of five rows or more is off by a quarter."""

    def step(self, work: list) -> StepResult:
        result = super().step(work)
        for (_, block), logits in zip(work, result.logits, strict=True):
            if len(block.tokens) >= 5 and block.rows > 1:
                logits[-1, 0] += 0.25
        return result


class Reading(ToyEngine):
    """Each row takes a microsecond for every token before it."""

    def step(self, work: list) -> StepResult:
        read = sum(table.length * len(block.tokens) for table, block in work)
        result = super().step(work)
        return result._replace(seconds=result.seconds + 1e-6 * read)


class DriftingDeep(ToyEngine):
    """Rows depend on the block behind a long context alone."""

    def step(self, work: list) -> StepResult:
        result = super().step(work)
        for (table, block), logits in zip(work, result.logits, strict=True):
            if len(block.tokens) >= 5 and block.rows > 1 and table.length > 1000:
                logits[-1, 0] += 0.25
        return result


class Failing(ToyEngine):
    """Has no room for a block of eight rows."""

    def step(self, work: list) -> StepResult:
        if len(work[0][1].tokens) == 8:
            raise CacheFull("no room")
        return super().step(work)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(context_length=512)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Not there yet: it is made when needed."""
    return tmp_path / "cache" / "measured"


def test_every_block_length_is_timed_behind_a_context(engine: ToyEngine):
    profile = measure_profile(engine)
    assert profile.context == 192
    # The toy says that a call takes a millisecond and every row a tenth of one.
    assert profile.seconds == pytest.approx({rows: 1e-3 + 1e-4 * rows for rows in ROWS})
    assert profile.cost(5) == pytest.approx(1.5e-3)


def test_only_the_block_lengths_asked_for_are_timed(engine: ToyEngine):
    assert list(measure_profile(engine, rows=(1, 2, 4)).seconds) == [1, 2, 4]


@pytest.mark.parametrize("min_rows", [1, 2])
def test_an_engine_whose_rows_do_not_depend_on_the_block_is_found_exact(min_rows: int):
    profile = measure_profile(ToyEngine(context_length=512, min_rows=min_rows))
    assert profile.row_invariant
    assert profile.largest_difference == 0.0


def test_an_engine_whose_rows_depend_on_the_block_is_found_out():
    profile = measure_profile(Drifting(context_length=512))
    assert not profile.row_invariant
    assert profile.largest_difference == pytest.approx(0.25, abs=1e-5)


def test_what_a_longer_context_costs_is_measured():
    profile = measure_profile(Reading(context_length=8192, cache_blocks=1024))
    assert (profile.context, profile.deep_context) == (192, 4096)
    for context in (192, 4096, 8000):
        for rows in (1, 4, 16):
            expected = 1e-3 + 1e-4 * rows + 1e-6 * rows * context
            assert profile.cost.at_context(context)(rows) == pytest.approx(expected)


def test_without_room_for_a_longer_context_costs_are_the_same_everywhere(engine: ToyEngine):
    profile = measure_profile(engine)
    assert (profile.deep_context, profile.deep_seconds) == (0, {})
    assert profile.cost.at_context(8000)(4) == profile.cost(4)


def test_rows_that_depend_on_the_block_behind_a_long_context_are_found_out():
    profile = measure_profile(DriftingDeep(context_length=8192, cache_blocks=1024))
    assert not profile.row_invariant
    assert profile.largest_difference == pytest.approx(0.25, abs=1e-5)


def test_a_short_context_is_measured_as_far_as_it_goes():
    assert measure_profile(ToyEngine(context_length=100)).context == 100 - 32 - 1


def test_measuring_leaves_no_slots_behind(engine: ToyEngine):
    free = engine.free_slots
    measure_profile(engine)
    assert engine.free_slots == free


def test_a_measurement_that_fails_leaves_no_slots_behind():
    engine = Failing(context_length=512)
    free = engine.free_slots
    with pytest.raises(CacheFull):
        measure_profile(engine)
    assert engine.free_slots == free


def test_what_was_measured_once_is_read_the_next_time(folder: Path):
    engine = Reading(context_length=8192, cache_blocks=1024)
    first = load_profile(engine, "model", folder)
    steps = engine.steps
    announced = StringIO()
    again = load_profile(engine, "model", folder, progress=Progress(announced))
    assert again == first
    assert (engine.steps, announced.getvalue()) == (steps, "")
    assert isinstance(next(iter(again.seconds)), int)


def test_measuring_is_announced_before_it_begins(engine: ToyEngine, folder: Path):
    class Watching(Progress):
        def say(self, text: str) -> None:
            steps.append(engine.steps)

    steps: list[int] = []
    load_profile(engine, "model", folder, progress=Watching(StringIO()))
    assert steps == [0]


def test_it_is_measured_again_on_demand(engine: ToyEngine, folder: Path):
    load_profile(engine, "model", folder)
    steps = engine.steps
    load_profile(engine, "model", folder, again=True)
    assert engine.steps == 2 * steps
    assert len(list(folder.iterdir())) == 1


def test_every_model_and_every_setting_is_measured_for_itself(engine: ToyEngine, folder: Path):
    load_profile(engine, "model", folder)
    load_profile(engine, "other model", folder)
    padded = ToyEngine(context_length=512, min_rows=2)
    load_profile(padded, "model", folder)
    assert padded.steps > 0
    files = sorted(folder.iterdir())
    assert len(files) == 3
    # What a file stands for can be read in it.
    values = [json.loads(file.read_text())["depends_on"] for file in files]
    assert {one["model"] for one in values} == {"model", "other model"}
    assert {one["min_rows"] for one in values} == {"1", "2"}


def test_what_is_kept_of_a_model_can_be_listed(engine: ToyEngine, folder: Path):
    assert stored_profiles("model", folder) == []
    profile = load_profile(engine, "model", folder)
    load_profile(engine, "other model", folder)
    (folder / "x.json").write_text("[]")
    (folder / "y.json").write_text("{")
    ((depends, kept),) = stored_profiles("model", folder)
    assert (depends["model"], depends["engine"], kept) == ("model", "toy", profile)


def without_context(content: str) -> str:
    return json.dumps({k: v for k, v in json.loads(content).items() if k != "context"})


def at_no_cost(content: str) -> str:
    return json.dumps({**json.loads(content), "seconds": {"1": 0.0}})


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda _: "",
        lambda content: content[: len(content) // 2],
        lambda _: "[]",
        lambda _: '"text"',
        lambda _: "{}",
        lambda content: content.replace('"seconds": {', '"seconds": {"many": 1, '),
        without_context,
        at_no_cost,
    ],
    ids=["empty", "cut", "a list", "a string", "nothing", "no number", "a key less", "no cost"],
)
def test_a_file_that_cannot_be_read_is_made_again(
    engine: ToyEngine, folder: Path, spoilt: Callable[[str], str]
):
    first = load_profile(engine, "model", folder)
    (file,) = folder.iterdir()
    good = file.read_text()
    file.write_text(spoilt(good))
    assert load_profile(engine, "model", folder) == first
    assert file.read_text() == good


def test_a_measurement_that_cannot_be_kept_is_used_all_the_same(engine: ToyEngine, folder: Path):
    load_profile(engine, "model", folder)
    (file,) = folder.iterdir()
    file.unlink()
    file.mkdir()  # in the way
    assert load_profile(engine, "model", folder).row_invariant
    assert list(folder.iterdir()) == [file], "nothing half-written is left"


def test_a_folder_that_cannot_be_made_does_not_matter(engine: ToyEngine, tmp_path: Path):
    (tmp_path / "file").touch()
    assert load_profile(engine, "model", tmp_path / "file" / "measured").row_invariant


def test_a_measurement_knows_its_costs():
    profile = CostProfile({1: 0.1, 3: 0.2}, True, 0.0, 256)
    assert profile.cost(2) == pytest.approx(0.15)
