"""A run that trains a head on the tiny target's hidden states."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.drafters.mtp import HeadConfig
from paceline.drafters.networks.target import read_target
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.models import QUIET, ModelFiles, Progress
from paceline_lab.train.answers import Answer
from paceline_lab.train.config import default_head_config
from paceline_lab.train.hidden_states import HiddenStates, record_hidden_states
from paceline_lab.train.target_logits import TargetLogits, check_end
from support.dflash import ends_of
from support.training import LETTERS, Stopped, easy_answers, stop_at

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from paceline_lab.train import forms  # noqa: E402
from paceline_lab.train.forms import Eagle3Form  # noqa: E402
from paceline_lab.train.mtp import Schedule, Trainer  # noqa: E402
from paceline_lab.train.plot import plot_curve  # noqa: E402
from paceline_lab.train.target_tensors import most_frequent, share_weights  # noqa: E402
from paceline_lab.train.trainer import mean_tokens_kept  # noqa: E402

pytestmark = pytest.mark.reference

_HIDDEN = 64
"""The tiny target's hidden size."""

SCHEDULE = Schedule(steps=40, texts=4, depth=3, rate=5e-3, evaluate_every=10)

Telling = Callable[[Callable[[int], object]], Progress]
MakeTrainer = Callable[..., Trainer]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Matrices this small take longer the more threads there are.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def config(tiny_files: ModelFiles) -> HeadConfig:
    return default_head_config(read_target(tiny_files.path), draft_vocab_size=len(LETTERS))


class Told(HiddenStates):
    """Recorded hidden states, with a last layer that says which letter follows."""

    def __init__(self, states: HiddenStates, answers: Sequence[Answer]) -> None:
        self._states, self._answers = states, answers

    def of(self, text: int) -> Any:
        rows = self._states.of(text).copy()
        rows[:, -_HIDDEN:] = 0
        for place, token in enumerate(self._answers[text].tokens[1:]):
            rows[place, LETTERS.index(token) - _HIDDEN] = 20
        return rows


def told_form(config: HeadConfig, drafted: Sequence[int], embeddings: Any) -> Eagle3Form:
    """Has its logits of `drafted` from the last layer of `Told`."""
    columns = [LETTERS.index(token) if token in LETTERS else -1 for token in drafted]
    return Eagle3Form(config, drafted, embeddings, lambda hidden: hidden[:, columns], 64)


@pytest.fixture(scope="module")
def engine(tiny_files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=tiny_files.context_length, taps=(0, 1))
    return open_engine("openvino", tiny_files.path, tiny_files.context_length, settings)


@pytest.fixture(scope="module")
def features(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> HiddenStates:
    folder = tmp_path_factory.mktemp("features")
    return record_hidden_states(engine, easy_answers(), folder, fingerprint="f", progress=QUIET)


@pytest.fixture(scope="module")
def make_trainer(tiny_files: ModelFiles, features: HiddenStates, config: HeadConfig) -> MakeTrainer:
    matrices = [rows.astype(np.float32) for rows in ends_of(tiny_files)]

    def make(folder: Path, drafted: Sequence[int] = LETTERS, **changes: Any) -> Trainer:
        shape = replace(config, draft_vocab_size=len(drafted))
        given: dict[str, Any] = {"config": shape, "answers": easy_answers()}
        given |= {"hidden_states": features, "schedule": SCHEDULE, **changes}
        given["hidden_states"] = Told(given["hidden_states"], given["answers"])
        given["form"] = told_form(given["config"], drafted, matrices[0])
        shared = share_weights(*matrices, drafted, "cpu")
        return Trainer(given.pop("config"), shared, folder=folder, **given)

    return make


# -- learning --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(make_trainer: MakeTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder).train(QUIET)
    return folder


def test_a_run_learns_an_easy_text_several_steps_deep(make_trainer: MakeTrainer, tmp_path: Path):
    trainer = make_trainer(tmp_path, schedule=replace(SCHEDULE, steps=120, evaluate_every=40))
    before = trainer.measures()
    tau = trainer.train(QUIET)
    curve = trainer.curve
    assert [point["step"] for point in curve] == [40, 80, 120]
    assert [point["texts"] for point in curve] == [160, 320, 480]
    assert before["named_1"] < 0.5
    assert tau == curve[-1]["tau"] > 3.5
    assert all(curve[-1][f"named_{step}"] > 0.9 for step in (1, 2, 3))
    assert json.loads((tmp_path / "curve.json").read_text())["curve"] == curve
    tensors = load_file(tmp_path / "model.safetensors")
    for name, rows in trainer.network.weights().items():
        assert torch.equal(tensors[name], rows.bfloat16()), name
    assert [row + int(more) for row, more in enumerate(tensors["d2t"])] == list(LETTERS)


def test_a_run_that_has_ended_is_not_run_again(make_trainer: MakeTrainer, run: Path):
    trainer = make_trainer(run)
    assert trainer.step == SCHEDULE.steps
    assert trainer.train(QUIET) == trainer.curve[-1]["tau"]
    assert trainer.step == SCHEDULE.steps


def test_a_curve_is_drawn(make_trainer: MakeTrainer, run: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = plot_curve(make_trainer(run).curve, tmp_path)
    assert path == tmp_path / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_tapped_hidden_states_are_scaled_by_their_std(
    make_trainer: MakeTrainer, features: HiddenStates, config: HeadConfig, tmp_path: Path
):
    width = config.tapped_size
    rows = np.concatenate([features.of(place)[1:, :width] for place in range(24)])
    spread = make_trainer(tmp_path).network.std.numpy()
    assert spread.shape == (width,)
    np.testing.assert_allclose(spread, rows.astype(np.float32).std(0), rtol=0.2)


def test_the_most_frequent_tokens_are_drafted():
    answers = [Answer(0, [9, 9, 9, 9], [5, 5, 2, 2, 2, 7])]
    assert most_frequent(answers, 2, vocab=11, least=1) == [2, 5]
    assert most_frequent(answers, 9, vocab=11, least=1) == [2, 5, 7]
    assert most_frequent(answers, 9, vocab=11, least=5) == [0, 1, 2, 5, 7]


def test_a_run_trains_one_draft_step_first_and_then_all(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    schedule = replace(SCHEDULE, steps=8, shallow=0.25, evaluate_every=8)
    trainer = make_trainer(tmp_path, schedule=schedule)
    depths = []
    forward = trainer.network.forward

    def counting(texts: Any, steps: int) -> Any:
        if trainer.network.training:
            depths.append(steps)
        return forward(texts, steps)

    monkeypatch.setattr(trainer.network, "forward", counting)
    trainer.train(QUIET)
    assert depths == [1, 1, 3, 3, 3, 3, 3, 3]


def test_measures_count_drafts_up_to_the_first_wrong_one(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(tmp_path)
    same = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 0]], bool)
    known = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
    monkeypatch.setattr(trainer, "_right", lambda _: (same, known))
    found = trainer.measures()
    assert found["named_1"] == pytest.approx(3 / 4)
    assert found["named_2"] == pytest.approx(2 / 3)
    assert found["named_3"] == pytest.approx(1 / 2)
    # Two drafts and the target's token, then one and the target's token.
    assert found["tau"] == pytest.approx(5 / 2)


def test_tau_has_a_call_for_each_draft():
    assert mean_tokens_kept([[0, 0, 0]]) == 1.0
    assert mean_tokens_kept([[2, 0, 0, 1], [0]]) == pytest.approx(6 / 3)
    assert mean_tokens_kept([]) == 0.0


def test_tokens_that_are_not_drafted_count_as_wrong(make_trainer: MakeTrainer, tmp_path: Path):
    trainer = make_trainer(tmp_path, [1, 2, 3], schedule=replace(SCHEDULE, steps=2))
    assert trainer.train(QUIET) == 1.0
    assert trainer.curve[-1]["loss"] == 0
    assert trainer.curve[-1]["named_1"] == 0


def test_too_few_answers_to_train_a_head_on_are_rejected(
    make_trainer: MakeTrainer, engine: Engine, tmp_path: Path
):
    answers = [replace(each, answer=each.answer[:3]) for each in easy_answers(4)]
    states = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    with pytest.raises(InvalidRequest, match="0 of 4 answers have 4 tokens or more"):
        make_trainer(tmp_path, answers=answers, hidden_states=states)


def test_a_head_learns_from_texts_of_any_length(
    make_trainer: MakeTrainer, engine: Engine, tmp_path: Path
):
    answers = [
        Answer(each.number, each.prompt[: 1 + number % 8], each.answer[: 4 + number])
        for number, each in enumerate(easy_answers())
    ]
    states = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    schedule = replace(SCHEDULE, steps=12, evaluate_every=6)
    trainer = make_trainer(tmp_path, answers=answers, hidden_states=states, schedule=schedule)
    trainer.train(QUIET)
    assert np.isfinite([point["loss"] for point in trainer.curve]).all()


def test_held_out_answers_may_be_too_short_to_learn_from(
    make_trainer: MakeTrainer, engine: Engine, tmp_path: Path
):
    answers = easy_answers()
    for place in (0, 20):  # those that would be held out
        answers[place] = replace(answers[place], answer=answers[place].answer[:3])
    states = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    schedule = replace(SCHEDULE, steps=1)
    trainer = make_trainer(tmp_path, answers=answers, hidden_states=states, schedule=schedule)
    assert trainer.train(QUIET) >= 1


# -- labels ----------------------------------------------------------------------------------------


# On CPUs with VNNI the engine rounds activations to 8 bits where the weights have 8.
@pytest.mark.parametrize(("form", "apart"), [("tiny_files", 2e-3), ("tiny_int8", 2e-2)])
def test_labels_are_the_logits_that_the_engine_computes(
    form: str, apart: float, request: pytest.FixtureRequest
):
    files: ModelFiles = request.getfixturevalue(form)
    settings = EngineSettings(cache_tokens=files.context_length, taps=(1,))
    engine = open_engine("openvino", files.path, files.context_length, settings)
    [answer] = easy_answers(1)
    with closing(engine.open()) as sequence:
        block = Block(answer.tokens[:8], 8)
        found = engine.step([(sequence, block)])
    drafted = [3, 100, 107, 200]
    logits = TargetLogits(read_target(files.path), drafted)(found.taps[0]["tap.1"])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, found.logits[0][:, drafted], atol=apart)


def test_a_target_whose_last_layer_is_another_is_refused(tiny_files: ModelFiles):
    drafted = list(LETTERS)
    [answer] = easy_answers(1)
    logits = TargetLogits(read_target(tiny_files.path), drafted)
    for tap, refused in ((1, False), (0, True)):
        settings = EngineSettings(cache_tokens=tiny_files.context_length, taps=(tap,))
        engine = open_engine("openvino", tiny_files.path, tiny_files.context_length, settings)
        with pytest.raises(InvalidRequest, match="after layer 0") if refused else nullcontext():
            check_end(engine, logits, drafted, answer.tokens)


# -- stopping and going on -------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [[5], [10], [25, 31, 39]], ids=str)
def test_a_stopped_run_of_a_head_ends_as_one_that_was_not_stopped(
    make_trainer: MakeTrainer, run: Path, tmp_path: Path, telling: Telling, stops: list[int]
):
    for step in stops:
        with pytest.raises(Stopped):
            make_trainer(tmp_path).train(telling(stop_at(step)))
    trainer = make_trainer(tmp_path)
    # What was learnt since the last evaluation is learnt again.
    assert trainer.step == (stops[-1] - 1) // 10 * 10
    trainer.train(QUIET)
    for name in ("model.safetensors", "config.json", "curve.json"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()


def test_a_run_may_be_made_longer(make_trainer: MakeTrainer, tmp_path: Path):
    make_trainer(tmp_path, schedule=replace(SCHEDULE, steps=10)).train(QUIET)
    longer = make_trainer(tmp_path, schedule=replace(SCHEDULE, steps=20, evaluate_every=5))
    assert longer.step == 10
    longer.train(QUIET)
    assert [point["step"] for point in longer.curve] == [10, 15, 20]


def test_a_run_stopped_while_it_wrote_leaves_the_same_head(
    make_trainer: MakeTrainer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(forms, "save_head", stop)
        make_trainer(tmp_path).train(QUIET)
    make_trainer(tmp_path).train(QUIET)
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"schedule": replace(SCHEDULE, rate=1e-4)}, "schedule"),
        ({"schedule": replace(SCHEDULE, seed=1)}, "schedule"),
        ({"schedule": replace(SCHEDULE, dropout=0.2)}, "schedule"),
        ({"schedule": replace(SCHEDULE, depth=2)}, "schedule"),
        ({"drafted": [1, 2]}, "head, drafted_tokens"),
        ({"drafted": [*LETTERS[1:], 150]}, "drafted_tokens"),
        ({"answers": easy_answers()[:23]}, "texts"),
        ({"answers": easy_answers()[::-1]}, "texts"),
    ],
    ids=[
        *("rate", "seed", "dropout", "depth", "fewer tokens", "other tokens"),
        *("fewer answers", "as many others"),
    ],
)
def test_the_state_of_another_head_is_refused(
    make_trainer: MakeTrainer, run: Path, changes: Any, differing: str
):
    with pytest.raises(InvalidRequest, match=f"of a run with another {differing}; choose") as error:
        make_trainer(run, **changes)
    assert str(run / "state.pt") in str(error.value)
