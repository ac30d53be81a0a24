"""Answers of a folder, read again to train on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest, ModelError, PacelineError
from paceline.runtime.model import Model
from paceline.runtime.stream import Stream
from paceline.storage.manifest import MANIFEST, write_manifest
from paceline_lab.train.answers import (
    ANSWERS,
    Answer,
    Settings,
    held_out,
    read_answers,
)
from support.training import SHORT, Asked, alone, entries, make


def test_answers_are_read_in_the_order_of_their_prompts(
    model: Model, write_prompts_file: Any, out: Path
):
    words = ["Hello", "banana", "a"]
    # The one in the middle ends first.
    make(Asked(model), write_prompts_file(*words), out, Settings(max_tokens=80))
    assert [*entries(out)] == [1, 0, 2]
    found = read_answers(out, model.files.fingerprint)
    assert [answer.number for answer in found] == [0, 1, 2]
    for answer, word in zip(found, words, strict=True):
        assert answer.prompt == model.tokens(word)
        assert answer.answer == alone(model, word, max_tokens=80).token_ids[: len(answer.answer)]
        assert answer.tokens == [*answer.prompt, *answer.answer]


def test_the_answers_of_a_stopped_run_can_be_read(
    model: Model, prompts: Path, out: Path, telling: Any
):
    def stop(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(model, prompts, out, progress=telling(stop))
    assert len(read_answers(out, model.files.fingerprint)) == 2


def test_a_folder_without_answers_is_rejected_with_the_command_to_run(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InvalidRequest, match=f"{folder} has no answers to train on.*train"):
            read_answers(folder, "f" * 64)


def test_a_folder_with_no_answer_yet_is_rejected(model: Model, prompts: Path, out: Path):
    with pytest.raises(KeyboardInterrupt):
        make(Asked(model, stop_at=0), prompts, out)
    with pytest.raises(InvalidRequest, match="no answers to train on"):
        read_answers(out, model.files.fingerprint)


def test_answers_of_other_weights_are_refused(model: Model, prompts: Path, out: Path):
    make(model, prompts, out)
    with pytest.raises(InvalidRequest, match="with other weights than this target's") as caught:
        read_answers(out, "f" * 64)
    assert model.files.name in str(caught.value)


def test_a_folder_that_holds_something_else_is_no_answers(tmp_path: Path):
    write_manifest(tmp_path, "paceline table", {}, [])
    with pytest.raises(InvalidRequest, match=f"{tmp_path}"):
        read_answers(tmp_path, "f" * 64)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_answers(tmp_path, "f" * 64)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (MANIFEST, b'{"kind": "paceline answers"}'),
        (ANSWERS, b'{"prompt": [1], "answer": [2]}\n'),
        (ANSWERS, b'{"number": "0", "prompt": 1, "answer": 2}\n{"number": 1}\n'),
    ],
)
def test_a_folder_that_was_tampered_with_is_refused(
    name: str, content: bytes, model: Model, prompts: Path, out: Path
):
    make(model, prompts, out)
    (out / name).write_bytes(content)
    with pytest.raises(PacelineError, match=name):
        read_answers(out, model.files.fingerprint)


def test_one_answer_in_twenty_is_held_out():
    answers = [Answer(number, [1], [2]) for number in range(0, 123, 3)]
    learnt, kept_back = held_out(answers)
    assert [answer.number for answer in kept_back] == [0, 60, 120]
    assert sorted([*learnt, *kept_back], key=lambda answer: answer.number) == answers
    assert len(learnt) == 38
    assert held_out([]) == ([], [])


def test_answers_are_greedy_explicitly_unless_a_temperature_is_set(
    model: Model, prompts: Path, tmp_path: Path
):
    asked: list[dict[str, Any]] = []

    class Watched(Model):
        def stream(self, prompt: Any, **options: Any) -> Stream:
            asked.append(options)
            return super().stream(prompt, **options)

    watched = Watched(model.files, model.engine)
    make(watched, prompts, tmp_path / "out", replace(SHORT, temperatures=(0.0, 0.7)))
    assert {options["temperature"] for options in asked} == {0.0, 0.7}
    for options in asked:
        assert options["generation_config"] == "none"
