"""A head of what was learnt: trained until time is over, and measured beside `auto`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paceline.models import QUIET, ModelFiles, Progress, resolve
from paceline.runtime.model import Model
from paceline_lab.learn.budget import Budget
from paceline_lab.learn.evaluate import Sets
from paceline_lab.learn.folder import Example
from paceline_lab.learn.head import compare_head, head_folder, is_unfinished, make_head, why_none
from support.dflash import ends_of
from support.logits_heads import write_logits_head
from support.training import Stopped, easy_answers, stop_at

torch = pytest.importorskip("torch")

from paceline_lab.train.mtp import Trainer  # noqa: E402
from paceline_lab.train.trainer import Text  # noqa: E402

pytestmark = pytest.mark.reference

FOREVER = float("inf")


class Late(Budget):
    """The time for hidden states is over after some answers, that for training after some steps."""

    answers, steps = 20, 0

    def over(self, part: float, share: float) -> Callable[[], float]:
        calls = count()
        most = self.answers if part < 1 else self.steps
        return lambda: next(calls) / most if most else 1.0


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
        make_head(model, head, training, budget=budget, progress=Stopping(quiet=True))
    assert is_unfinished(head)
    make_head(model, head, training, budget=budget, progress=QUIET)
    assert not is_unfinished(head)
    assert {path.name for path in head.iterdir()} >= {"config.json", "model.safetensors"}
    sets = Sets(training[:2], training[2:3])
    compared = compare_head(model, head, sets, engine=engine, budget=budget, progress=QUIET)
    assert [one.answers for one in compared.values()] == [2, 1]
    assert all(one.tokens_per_step >= 1 and one.speed > 0 for one in compared.values())


def test_answers_are_measured_as_they_were_made_and_those_that_go_round_are_not(
    training: list[Example], tiny_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    head = tmp_path / "head"
    write_logits_head(head, *ends_of(tiny_files))
    asked: list[Any] = []
    generate = Model.generate

    def noting(model: Model, prompt: Any, **options: Any) -> Any:
        asked.append((options["temperature"], options["seed"]))
        return generate(model, prompt, **options)

    monkeypatch.setattr(Model, "generate", noting)
    monkeypatch.setattr("paceline_lab.learn.head.temperatures_of", lambda _: (0.0, 0.8))
    monkeypatch.setattr(Example, "loops", property(lambda one: one.answer.number == 1))
    sets = Sets(training[:3], [])
    budget = Budget(FOREVER, 1000)
    compared = compare_head(
        tiny_files.name, head, sets, engine="openvino", budget=budget, progress=QUIET
    )
    assert {*asked} == {(0.0, 0), (0.8, 1), (0.0, 2)}
    assert compared["held_out"].answers == 2


def test_training_ends_with_the_time_and_the_head_of_fewer_answers_goes(
    training: list[Example], tiny_files: ModelFiles, tmp_path: Path
):
    outdated = tmp_path / "mtp-outdated"
    (outdated / "features").mkdir(parents=True)
    head = head_folder(tmp_path, training)
    assert not make_head(tiny_files.name, head, training, budget=Budget(0.0), progress=QUIET)
    late = Late(100.0)
    assert not make_head(tiny_files.name, head, training, budget=late, progress=QUIET)
    assert is_unfinished(head)
    late.steps = 3
    assert make_head(tiny_files.name, head, training, budget=late, progress=QUIET)
    (point,) = json.loads((head / "curve.json").read_text())["curve"]
    assert point["step"] == 2
    assert not outdated.exists()


def test_time_decides_how_many_answers_are_recorded_and_how_far_the_schedule_is(
    training: list[Example], tiny_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rates, depths = [], []
    step, depth = Trainer._train_step, Trainer._depth

    def noting(trainer: Trainer, texts: list[Text]) -> float:
        rates.append(trainer._learning_rate())
        depths.append(depth(trainer))
        return step(trainer, texts)

    monkeypatch.setattr(Trainer, "_train_step", noting)
    late = Late(100.0)
    late.answers, late.steps = 21, 20
    head = head_folder(tmp_path, training)
    assert make_head(tiny_files.name, head, training, budget=late, progress=QUIET)
    curve = json.loads((head / "curve.json").read_text())
    assert curve["texts"].startswith("20,"), "22 texts, of which two are held out"
    assert depths == [1] * 5 + [4] * 5, "two calls a step"
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 0.2 * max(rates)
