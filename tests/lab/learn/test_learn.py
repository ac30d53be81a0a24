"""`learn` on the tiny model: from prompts to a table, and what stops it on the way."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from paceline.cli.app import main
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.drafting import installed_drafters, learned_dir
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline_lab.cli import learn as command
from paceline_lab.learn import data
from paceline_lab.learn.folder import TrainingAnswer
from paceline_lab.learn.table import Gain, divided, is_gain
from support.reports import report_of
from support.tiny import write_tiny

END = 2  # the id of <|im_end|>
BIAS = {"prompts": 3.0, "answers": 0.0}
"""Towards the end: the tiny model seldom ends a text by itself."""
TOPICS = ["Bake a cake with the number", "Which doctor treats the number", "Say the number"]


@pytest.fixture(autouse=True)
def learning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tiny_files: ModelFiles
) -> Iterator[list[Any]]:
    """Nothing learnt before, nothing left behind, and the list of prompts that were asked."""
    prompts: list[Any] = []
    batch_request = Model._batch_request

    def ending(self: Model, prompt: Any, options: Any) -> BatchRequest:
        prompts.append(prompt)
        bias = BIAS["prompts" if options.get("raw") else "answers"]
        return batch_request(self, prompt, {**options, "logit_bias": {END: bias}})

    monkeypatch.setattr(Model, "_batch_request", ending)
    monkeypatch.setattr(command, "lower_priority", lambda: None)
    # Small, as each text takes the same tokens of a large model.
    for name, value in {"MAX_TOKENS": 24, "LONGEST_PROMPT": 48, "_ROUND": 8, "AT_ONCE": 8}.items():
        monkeypatch.setattr(data, name, value)
    yield prompts
    rmtree(learned_dir(), ignore_errors=True)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Prompts of topics that are learnt from, and of those that are not."""
    path = tmp_path / "given.jsonl"
    lines = [{"prompt": f"{TOPICS[number % 3]} {number}"} for number in range(48)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def learn(model: str, tokens: int = 200, **options: Any) -> dict[str, Any]:
    settings = {"tokens": tokens, "engine": "llamacpp", "prompts": [], "exclude": [], **options}
    return report_of(command.learn, lambda: None, model=model, **settings).value


def answers_file(report: dict[str, Any]) -> Path:
    return Path(report["folder"]) / "answers.jsonl"


def answers_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answers_file(report).read_text().splitlines()]


def test_a_model_learns_from_its_own_prompts(tiny_files: ModelFiles):
    report = learn(tiny_files.name)
    prompts, answers = report["prompts"], report["answers"]
    assert answers["tokens"] >= 200
    assert prompts["prompts"] == answers["answers"] == len(answers_of(report))
    assert len(prompts["openings"]) > 5
    assert report["table"]["installed"] == bool(installed_drafters(tiny_files))
    assert report["seconds"] > 0


def test_training_responses_answer_the_models_own_prompts(model: Model):
    for line in answers_of(learn(model.files.name)):
        if len(line["texts"]) == 1:
            assert line["prompt"] == model.tokens(line["texts"][0])
        alone = model.stream(line["prompt"], drafter="none", max_tokens=24)
        for _ in alone:
            pass
        assert line["answer"] == alone.result.token_ids[: len(line["answer"])]
        assert line["finish"] == "repetition" or line["answer"] == alone.result.token_ids


def test_short_responses_get_a_second_turn(tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(BIAS, "answers", 3.0)
    second = [line for line in answers_of(learn(tiny_files.name, 50)) if len(line["texts"]) > 1]
    assert second
    again = learn(tiny_files.name, 1)["prompts"]
    assert again["openings"]["follow-up"] == len(second), "an earlier run's are known again"


def test_a_later_run_continues_and_repeats_nothing(tiny_files: ModelFiles, learning: list[Any]):
    first = learn(tiny_files.name, 150)
    before = answers_file(first).read_bytes()
    learning.clear()
    again = learn(tiny_files.name, 150)
    assert learning == [], "there are enough answers already"
    assert again["answers"] == first["answers"]
    more = learn(tiny_files.name, 400)
    assert more["answers"]["tokens"] >= 400
    assert answers_file(more).read_bytes().startswith(before)
    prompts = [tuple(line["prompt"]) for line in answers_of(more)]
    assert len({*prompts}) == len(prompts)
    seeds = [line["seed"] for line in answers_of(more)]
    assert len({*seeds}) == len(seeds)


def test_an_interrupted_run_keeps_finished_responses(
    tiny_files: ModelFiles, given: Path, monkeypatch: pytest.MonkeyPatch, learning: list[Any]
):
    with monkeypatch.context() as patched:
        batch_request = Model._batch_request

        def interrupted(self: Model, prompt: Any, options: Any) -> BatchRequest:
            if len(learning) == 44:
                raise KeyboardInterrupt
            return batch_request(self, prompt, options)

        patched.setattr(Model, "_batch_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learn(tiny_files.name, 100, prompts=[given])
    (path,) = learned_dir().glob("*/answers.jsonl")
    kept = path.read_bytes()
    assert kept.count(b"\n") > 0
    path.write_bytes(kept + b'{"texts": ["half a li')
    learning.clear()
    resumed = learn(tiny_files.name, 100, prompts=[given])
    assert resumed["answers"]["answers"] == 48
    assert answers_file(resumed).read_bytes().startswith(kept)
    assert len(learning) == 48 - kept.count(b"\n"), "nothing is made again"


def test_user_prompts_are_answered_and_split_by_topic(given: Path, tiny_files: ModelFiles):
    report = learn(tiny_files.name, 200, prompts=[given])
    answers = report["answers"]
    assert answers["answers"] == 48
    assert 0 < answers["cooking and health"]["answers"] <= 32
    table = report["table"]
    sets = table["sets"].values()
    gains = [one["gain"] >= 1.01 and one["answers"] >= 8 for one in sets]
    assert table["installed"] == (gains == [True, True])


def test_long_and_repeated_prompts_are_skipped_and_looping_responses_end(
    tmp_path: Path, tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    prompts = tmp_path / "prompts.jsonl"
    words = ["x " * 800, "banana", "Paris", "banana", "Say the number"]
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    monkeypatch.setattr(data, "MAX_TOKENS", 160)
    report = learn(tiny_files.name, 1, prompts=[prompts])
    made = [(line["texts"][0], line["finish"]) for line in answers_of(report)]
    loop = "repetition"
    assert sorted(made) == [("Paris", loop), ("Say the number", "length"), ("banana", loop)]
    assert report["answers"]["loops"] == 2


def test_a_model_without_a_template_continues_its_own_texts(tmp_path: Path):
    base = str(write_tiny(tmp_path / "base.gguf", fields={"tokenizer.chat_template": None}))
    made = answers_of(learn(base, 100))
    encode = load(base).files.tokenizer.encode
    assert all(line["prompt"] == encode(line["texts"][0], special=True) for line in made)


def test_a_template_that_cannot_open_a_user_turn_needs_prompts(given: Path, tmp_path: Path):
    template = "{{ messages[0].content }}"
    path = write_tiny(tmp_path / "odd.gguf", fields={"tokenizer.chat_template": template})
    with pytest.raises(ModelError, match="--prompts"):
        learn(str(path))
    assert [*learned_dir().glob("*")] == []
    assert learn(str(path), 100, prompts=[given])["answers"]["answers"] == 48


def test_a_model_that_never_ends_a_prompt_is_rejected(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data, "_MAX_UNUSED", 8)
    monkeypatch.setattr(data, "LONGEST_PROMPT", 1)
    with pytest.raises(InvalidRequest, match="--prompts"):
        learn(tiny_files.name)


def test_an_invalid_response_line_is_named(tiny_files: ModelFiles):
    path = answers_file(learn(tiny_files.name, 100))
    path.write_text('{"texts": ["a"], "prompt": [1], "answer": "2"}\n')
    with pytest.raises(InvalidRequest, match=r"line 1 of .*answers.jsonl"):
        learn(tiny_files.name, 100)


def test_a_full_disk_is_rejected_before_learning(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    usage = SimpleNamespace(free=10_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(InvalidRequest, match=r"10\.0 MB"):
        learn(tiny_files.name)


def test_learn_is_a_command_and_forget_undoes_it(
    tiny_files: ModelFiles, capsys: pytest.CaptureFixture[str]
):
    words = [tiny_files.name, "--tokens", "300", "--engine", "llamacpp"]
    assert get_command(command.learn.app).main(words, standalone_mode=False) == 0
    out, said = capsys.readouterr()
    assert "answers with" in out
    assert "nothing of it leaves this machine" in said
    assert main(["forget", "--model", tiny_files.name, "--json"]) == 0
    (learnt,) = json.loads(capsys.readouterr().out)["learnt"]
    assert learnt["model"] == tiny_files.name
    assert learnt["bytes"] > 0
    assert [*learned_dir().glob("*/*")] == []


# -- what is learnt from, and when it is installed ------------------------------------------------


def answer(text: str, tokens: Sequence[int], finish: str = "stop") -> TrainingAnswer:
    return TrainingAnswer([text], [1], list(tokens), finish)


def test_loops_and_responses_without_drafts_are_excluded():
    listed = answer("Say", [5, 6] * 60)
    training, sets = divided([answer("Say", [5, 6, 7], "repetition"), listed, answer("Hm", [5])])
    assert [*training, *sets["held_out"]] == [listed]


@pytest.mark.parametrize(
    ("gains", "installed"),
    [([1.1, 1.02], True), ([1.1, 1.0], False), ([0.99, 1.5], False), ([1.5], False), ([], False)],
)
def test_a_table_is_installed_if_every_test_set_gains(gains: list[float], installed: bool):
    def sets(answers: int) -> dict[str, Gain]:
        return {f"{gain}": Gain(answers, 1.5, 1.4, 1.3 * gain, 1.3) for gain in gains}

    assert is_gain(sets(8)) == installed
    assert not is_gain(sets(7))
