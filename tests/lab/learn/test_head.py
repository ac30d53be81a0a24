"""A head of what was learnt: trained until time is over, and measured beside `auto`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest
from paceline.models import QUIET, ModelFiles, Progress, resolve
from paceline_lab.learn.budget import Budget
from paceline_lab.learn.evaluate import Sets
from paceline_lab.learn.folder import Example
from paceline_lab.learn.head import compare_head, head_folder, is_unfinished, make_head, why_none
from support.training import Stopped, easy_answers, stop_at

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.reference

FOREVER = float("inf")
COST = CostTable({1: 1e-6, 32: 1e-6})


class Late(Budget):
    """Has time to record hidden states, and a number of steps."""

    calls = 0

    def stop_after(self, share: float) -> Callable[[], bool]:
        def stop() -> bool:
            self.calls += 1
            return self.calls > 0

        return stop


class Stopping(Progress):
    """Stops the work when three of anything are done."""

    @contextmanager
    def task(
        self, label: str, total: int | None = None, *, unit: str = "bytes"
    ) -> Iterator[Callable[[int], None]]:
        yield stop_at(3)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Matrices this small take longer the more threads there are.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def training(cache: Path) -> list[Example]:
    return [Example([""], "free", answer) for answer in easy_answers(24)]


@pytest.mark.parametrize("engine", ["openvino", "llamacpp"])
def test_a_head_is_trained_from_where_it_was_stopped_and_changes_no_answer(
    training: list[Example], tiny_gguf: Path, tmp_path: Path, engine: str
):
    if engine == "llamacpp":
        pytest.importorskip("ik_llama_cpp")
    model = str(tiny_gguf)
    head, budget = head_folder(tmp_path, training), Budget(FOREVER, 1000)
    assert why_none(resolve(model, engine=engine)) == ""
    with pytest.raises(Stopped):
        make_head(model, head, training, cost=COST, budget=budget, progress=Stopping(quiet=True))
    assert is_unfinished(head)
    make_head(model, head, training, cost=COST, budget=budget, progress=QUIET)
    assert not is_unfinished(head)
    assert {path.name for path in head.iterdir()} >= {"config.json", "model.safetensors"}
    sets = Sets(training[:2], training[2:3])
    compared = compare_head(model, head, sets, engine=engine, budget=budget, progress=QUIET)
    assert [one.answers for one in compared.values()] == [2, 1]
    assert all(one.tokens_per_step >= 1 and one.speed > 0 for one in compared.values())


def test_training_ends_with_the_time_and_the_head_of_fewer_answers_goes(
    training: list[Example], tiny_files: ModelFiles, tmp_path: Path
):
    outdated = tmp_path / "mtp-outdated"
    (outdated / "features").mkdir(parents=True)
    head = head_folder(tmp_path, training)
    with pytest.raises(InvalidRequest):
        make_head(tiny_files.name, head, training, cost=COST, budget=Budget(0.0), progress=QUIET)
    late = Late(100.0)
    assert not make_head(tiny_files.name, head, training, cost=COST, budget=late, progress=QUIET)
    assert is_unfinished(head)
    late.calls = -1
    assert make_head(tiny_files.name, head, training, cost=COST, budget=late, progress=QUIET)
    assert len(json.loads((head / "curve.json").read_text())["curve"]) == 1
    assert not outdated.exists()
