"""A run on the tiny target, from features to a drafter."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.drafters.dflash import Config, read_config
from paceline.drafters.dflash.checkpoint import read_draft_vocab, read_weights
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.models import QUIET, ModelFiles, Progress
from paceline.tools.train.answers import Answer
from paceline.tools.train.hidden_states import ROWS, HiddenStates, record_hidden_states
from support.dflash import ends_of, tiny_config
from support.training import LETTERS, Stopped, easy_answers, stop_at

torch = pytest.importorskip("torch")

from paceline.tools.train import dflash  # noqa: E402
from paceline.tools.train.dflash import Schedule, Trainer  # noqa: E402
from paceline.tools.train.plot import plot_curve  # noqa: E402
from paceline.tools.train.target_tensors import most_frequent, share_weights  # noqa: E402

pytestmark = pytest.mark.reference

SCHEDULE = Schedule(steps=40, texts=4, anchors=8, rate=5e-3, evaluate_every=10)

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
def engine(tiny_files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=tiny_files.context_length, taps=(0, 1))
    return open_engine("openvino", tiny_files.path, tiny_files.context_length, settings)


@pytest.fixture(scope="module")
def features(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> HiddenStates:
    folder = tmp_path_factory.mktemp("features")
    return record_hidden_states(engine, easy_answers(), folder, fingerprint="f", progress=QUIET)


@pytest.fixture(scope="module")
def config(tiny_files: ModelFiles) -> Config:
    return tiny_config(tiny_files, num_hidden_layers=1, block_size=4)


@pytest.fixture(scope="module")
def make_trainer(tiny_files: ModelFiles, features: HiddenStates, config: Config) -> MakeTrainer:
    ends = ends_of(tiny_files)

    def make(folder: Path, drafted: Sequence[int] | None = None, **changes: Any) -> Trainer:
        matrices = [rows.astype(np.float32) for rows in ends]
        given: dict[str, Any] = {"config": config, "answers": easy_answers()}
        given |= {"hidden_states": features, "schedule": SCHEDULE, **changes}
        return Trainer(
            given.pop("config"), share_weights(*matrices, drafted, "cpu"), folder=folder, **given
        )

    return make


# -- learning --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(make_trainer: MakeTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder).run(QUIET, None)
    return folder


def test_a_run_learns_an_easy_text_and_leaves_a_drafter(
    make_trainer: MakeTrainer, config: Config, tmp_path: Path
):
    trainer = make_trainer(tmp_path, schedule=replace(SCHEDULE, steps=120, evaluate_every=40))
    before = trainer.evaluate()
    tau = trainer.run(QUIET, None)
    curve = trainer.curve
    assert [point["step"] for point in curve] == [40, 80, 120]
    assert [point["blocks"] for point in curve] == [1280, 2560, 3840]
    assert curve[-1]["loss"] < 0.6 * curve[0]["loss"]
    assert before < 1.5
    assert 2.5 < tau <= config.block_size
    assert tau == curve[-1]["tau"]
    assert read_config(tmp_path) == config
    for name, rows in read_weights(tmp_path, config).items():
        assert np.array_equal(rows, trainer.network.weights()[name].bfloat16().float().numpy())
    assert json.loads((tmp_path / "curve.json").read_text())["curve"] == curve


def test_a_run_that_has_ended_is_not_run_again(make_trainer: MakeTrainer, run: Path):
    trainer = make_trainer(run)
    assert trainer.step == SCHEDULE.steps
    assert trainer.run(QUIET, None) == trainer.curve[-1]["tau"]
    assert trainer.step == SCHEDULE.steps


def test_a_curve_is_drawn(make_trainer: MakeTrainer, run: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = plot_curve(make_trainer(run).curve, tmp_path, x="blocks")
    assert path == tmp_path / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_may_draft_from_a_part_of_the_vocabulary(make_trainer: MakeTrainer, tmp_path: Path):
    drafted = list(LETTERS)
    trainer = make_trainer(tmp_path, drafted)
    assert trainer.run(QUIET, drafted) > 1.5
    found = read_draft_vocab(tmp_path, read_config(tmp_path))
    assert found is not None
    assert found.tolist() == drafted


def test_tokens_that_are_not_drafted_are_not_training(make_trainer: MakeTrainer, tmp_path: Path):
    # What is left to learn are the target's hidden states, whatever the drafted tokens are.
    curves = []
    for drafted in ([1, 2, 3], [4, 5]):
        trainer = make_trainer(tmp_path / str(len(drafted)), drafted)
        assert trainer.run(QUIET, drafted) == 1.0
        curves.append(trainer.curve)
    assert curves[0] == curves[1]
    assert 0 < curves[0][-1]["loss"] < 0.9 * curves[0][0]["loss"]


def test_tapped_hidden_states_are_scaled_by_their_std(
    make_trainer: MakeTrainer, features: HiddenStates, tmp_path: Path
):
    seen = np.concatenate([features.of(place)[1:] for place in range(24)]).astype(np.float32)
    spread = make_trainer(tmp_path).network.std.numpy()
    assert spread.shape == (128,)
    np.testing.assert_allclose(spread, seen.std(0), rtol=0.2)


def test_the_last_layer_is_a_training_target_and_no_input(
    make_trainer: MakeTrainer, engine: Engine, config: Config, tmp_path: Path
):
    one = replace(config, target_layer_ids=(0,))
    trainer = make_trainer(tmp_path, config=one, schedule=replace(SCHEDULE, steps=20))
    assert trainer.run(QUIET, None) > 1.5
    assert read_weights(tmp_path, one)["fc.weight"].shape == (64, 64)


def test_the_most_frequent_tokens_are_found():
    answers = [Answer(0, [9, 9, 9, 9], [5, 5, 2, 2, 2, 7])]
    assert most_frequent(answers, 2) == [2, 5]
    assert most_frequent(answers, 9) == [2, 5, 7]


def test_texts_of_any_length_are_training_together(
    make_trainer: MakeTrainer, engine: Engine, tmp_path: Path
):
    # The shortest have no more than a block, and fewer places than a step has blocks.
    answers = [
        Answer(each.number, each.prompt[: 1 + number % 8], each.answer[: 4 + number])
        for number, each in enumerate(easy_answers())
    ]
    features = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    schedule = replace(SCHEDULE, steps=12, evaluate_every=6)
    trainer = make_trainer(tmp_path, answers=answers, hidden_states=features, schedule=schedule)
    trainer.run(QUIET, None)
    assert np.isfinite([point["loss"] for point in trainer.curve]).all()


def test_answers_too_short_for_features_are_no_error(
    make_trainer: MakeTrainer, engine: Engine, tmp_path: Path
):
    answers = easy_answers()
    for place in (0, 20):  # those that would be held out are shorter than a block
        answers[place] = replace(answers[place], answer=answers[place].answer[:3])
    features = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    schedule = replace(SCHEDULE, steps=1)
    trainer = make_trainer(tmp_path, answers=answers, hidden_states=features, schedule=schedule)
    assert trainer.run(QUIET, None) >= 1


def test_too_few_answers_to_train_on_are_rejected(
    make_trainer: MakeTrainer, engine: Engine, tmp_path: Path
):
    answers = easy_answers(1)
    features = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    with pytest.raises(InvalidRequest):
        make_trainer(tmp_path, answers=answers, hidden_states=features).run(QUIET, None)


# -- stopping and going on -------------------------------------------------------------------------


def assert_same_run(found: Trainer, expected: Trainer) -> None:
    assert found.curve == expected.curve
    others = expected.network.weights()
    for name, rows in found.network.weights().items():
        assert torch.equal(rows, others[name]), name


@pytest.mark.parametrize("stops", [[5], [10], [15], [25, 31, 39]], ids=str)
def test_a_stopped_run_ends_as_one_that_was_not_stopped(
    make_trainer: MakeTrainer, run: Path, tmp_path: Path, telling: Telling, stops: list[int]
):
    for step in stops:
        with pytest.raises(Stopped):
            make_trainer(tmp_path).run(telling(stop_at(step)), None)
    trainer = make_trainer(tmp_path)
    # What was learnt since it was last looked at is learnt again.
    assert trainer.step == stops[-1] // 10 * 10 - (10 if stops[-1] % 10 == 0 else 0)
    trainer.run(QUIET, None)
    assert_same_run(trainer, make_trainer(run))
    for name in ("model.safetensors", "config.json", "curve.json"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()


def test_a_run_may_be_made_longer(make_trainer: MakeTrainer, tmp_path: Path):
    make_trainer(tmp_path, schedule=replace(SCHEDULE, steps=10)).run(QUIET, None)
    longer = make_trainer(tmp_path, schedule=replace(SCHEDULE, steps=20, evaluate_every=5))
    assert longer.step == 10
    longer.run(QUIET, None)
    assert [point["step"] for point in longer.curve] == [10, 15, 20]


def test_a_run_that_was_stopped_while_it_wrote_leaves_the_same_drafter(
    make_trainer: MakeTrainer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    make_trainer(tmp_path, schedule=replace(SCHEDULE, steps=30)).run(QUIET, None)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(dflash, "save_checkpoint", stop)
        make_trainer(tmp_path).run(QUIET, None)
    trainer = make_trainer(tmp_path)
    trainer.run(QUIET, None)
    for name, rows in read_weights(tmp_path, read_config(tmp_path)).items():
        assert np.array_equal(rows, trainer.network.weights()[name].bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"schedule": replace(SCHEDULE, rate=1e-4)}, "schedule"),
        ({"schedule": replace(SCHEDULE, seed=1)}, "schedule"),
        ({"schedule": replace(SCHEDULE, gamma=4.0)}, "schedule"),
        ({"drafted": [1, 2]}, "drafted_tokens"),
        ({"answers": easy_answers()[:23]}, "texts"),
        ({"answers": easy_answers()[:23], "drafted": [1, 2]}, "drafted_tokens, texts"),
    ],
    ids=["rate", "seed", "gamma", "vocabulary", "answers", "both"],
)
def test_the_state_of_another_run_is_refused(
    make_trainer: MakeTrainer, run: Path, changes: Any, differing: str
):
    with pytest.raises(
        InvalidRequest, match=rf"of a run with another {differing}; choose"
    ) as error:
        make_trainer(run, **changes)
    assert str(run / "state.pt") in str(error.value)


def test_the_state_of_another_drafter_is_refused(
    make_trainer: MakeTrainer, config: Config, run: Path
):
    with pytest.raises(InvalidRequest, match="of a run with another drafter; choose"):
        make_trainer(run, config=replace(config, block_size=5))


@pytest.mark.parametrize("what", ["drafted", "answers"])
def test_the_state_of_a_run_on_as_many_others_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, what: str
):
    schedule = replace(SCHEDULE, steps=1)
    first: dict[str, Any] = {"drafted": [100, 101], "answers": easy_answers()}
    make_trainer(tmp_path, schedule=schedule, **first).run(QUIET, first["drafted"])
    others = {"drafted": [102, 103], "answers": easy_answers()[::-1]}
    with pytest.raises(InvalidRequest, match="of a run with another"):
        make_trainer(tmp_path, schedule=schedule, **{**first, what: others[what]})


# -- features --------------------------------------------------------------------------------------


def test_features_are_what_the_engine_shows(engine: Engine, features: HiddenStates):
    for place, answer in enumerate(easy_answers()[:3]):
        with closing(engine.open()) as sequence:
            taps = engine.step([(sequence, Block(answer.tokens, 0, prefill=True))]).taps[0]
            expected = np.concatenate([taps["tap.0"], taps["tap.1"]], axis=1)
        assert features.of(place).dtype == np.float16
        assert np.array_equal(features.of(place), expected.astype(np.float16))


@pytest.mark.parametrize("left", [0, 1, 100, 38 * 256, 38 * 256 + 5, 3 * 38 * 256, -1, None])
def test_features_continue_after_a_truncated_file(engine: Engine, tmp_path: Path, left: int | None):
    answers = easy_answers(4)
    record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    whole = (tmp_path / ROWS).read_bytes()
    assert len(whole) == 4 * 38 * 256
    (tmp_path / ROWS).write_bytes(whole[:left])
    found = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    assert (tmp_path / ROWS).read_bytes() == whole
    assert found.of(3).tobytes() == whole[3 * 38 * 256 :]


def test_only_features_that_are_missing_are_made(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = easy_answers(6)
    record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    (tmp_path / ROWS).write_bytes((tmp_path / ROWS).read_bytes()[: 4 * 38 * 256 + 9])
    calls = []
    step = type(engine).step

    def counting(self: Any, work: Any) -> Any:
        calls.append(work)
        return step(self, work)

    monkeypatch.setattr(type(engine), "step", counting)
    record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    assert len(calls) == 3, "the first, to learn how wide a row is, and the two that are missing"


def test_features_of_others_are_refused(engine: Engine, tmp_path: Path, tiny_files: ModelFiles):
    answers = easy_answers(3)
    record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    settings = EngineSettings(cache_tokens=64, taps=(1,))
    one_tap = open_engine("openvino", tiny_files.path, tiny_files.context_length, settings)
    for changed in (
        {"answers": answers[:2]},
        {"fingerprint": "g"},
        {"engine": one_tap},
    ):
        given: Any = {"engine": engine, "answers": answers, "fingerprint": "f", **changed}
        with pytest.raises(InvalidRequest, match="hidden states of other answers, taps or weights"):
            record_hidden_states(folder=tmp_path, progress=QUIET, **given)


def test_features_of_other_answers_with_the_same_numbers_are_refused(
    engine: Engine, tmp_path: Path
):
    answers = easy_answers(3)
    record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    others = [replace(each, answer=each.answer[::-1]) for each in answers]
    with pytest.raises(InvalidRequest):
        record_hidden_states(engine, others, tmp_path, fingerprint="f", progress=QUIET)
