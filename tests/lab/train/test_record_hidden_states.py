"""Hidden states of the tiny target, recorded for training."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.models import QUIET, ModelFiles
from paceline_lab.train.hidden_states import ROWS, record_hidden_states
from support.training import easy_answers


@pytest.fixture(scope="module")
def engine(tiny_files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=tiny_files.context_length, taps=(0, 1))
    return open_engine("openvino", tiny_files.path, tiny_files.context_length, settings)


def test_hidden_states_are_what_the_engine_shows(engine: Engine, tmp_path: Path):
    answers = easy_answers(3)
    states = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    for place, answer in enumerate(answers):
        with closing(engine.open()) as sequence:
            taps = engine.step([(sequence, Block(answer.tokens, 0, prefill=True))]).taps[0]
            expected = np.concatenate([taps["tap.0"], taps["tap.1"]], axis=1)
        assert states.of(place).dtype == np.float16
        assert np.array_equal(states.of(place), expected.astype(np.float16))


@pytest.mark.parametrize("left", [0, 1, 100, 38 * 256, 38 * 256 + 5, 3 * 38 * 256, -1, None])
def test_hidden_states_continue_after_a_truncated_file(
    engine: Engine, tmp_path: Path, left: int | None
):
    answers = easy_answers(4)
    record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    whole = (tmp_path / ROWS).read_bytes()
    assert len(whole) == 4 * 38 * 256
    (tmp_path / ROWS).write_bytes(whole[:left])
    found = record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    assert (tmp_path / ROWS).read_bytes() == whole
    assert found.of(3).tobytes() == whole[3 * 38 * 256 :]


def test_only_hidden_states_that_are_missing_are_made(
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


def test_hidden_states_of_others_are_refused(
    engine: Engine, tmp_path: Path, tiny_files: ModelFiles
):
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


def test_hidden_states_of_other_answers_with_the_same_numbers_are_refused(
    engine: Engine, tmp_path: Path
):
    answers = easy_answers(3)
    record_hidden_states(engine, answers, tmp_path, fingerprint="f", progress=QUIET)
    others = [replace(each, answer=each.answer[::-1]) for each in answers]
    with pytest.raises(InvalidRequest):
        record_hidden_states(engine, others, tmp_path, fingerprint="f", progress=QUIET)
