"""`learn` on the tiny model: from prompts to a table, and what stops it on the way."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from paceline.cli.app import main
from paceline.errors import InvalidRequest, ModelError
from paceline.models import QUIET, ModelFiles
from paceline.runtime.learnt import HEADER, installed_drafters, learnt_dir
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.stream import Stream
from paceline_lab.cli.learn import app
from paceline_lab.learn import command
from paceline_lab.learn.answers import Answer
from paceline_lab.learn.evaluate import Comparison, Sets, divided, is_gain
from paceline_lab.learn.folder import Example, LearntFolder
from support.tiny import write_tiny

END = 2  # the id of <|im_end|>
TOPICS = ["Bake a cake with the number", "Which doctor treats the number", "Say the number"]


@pytest.fixture(autouse=True)
def learning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tiny_files: ModelFiles
) -> Iterator[list[Any]]:
    """Nothing learnt before, nothing left behind, and the list of prompts that were streamed."""
    prompts: list[Any] = []
    stream = Model.stream

    def ending(self: Model, prompt: Any, **options: Any) -> Stream:
        prompts.append(prompt)
        # The tiny model seldom ends by itself.
        return stream(self, prompt, **options, logit_bias={END: 2.0})

    monkeypatch.setattr(Model, "stream", ending)
    monkeypatch.setattr(command, "lower_priority", lambda: None)
    yield prompts
    rmtree(learnt_dir(), ignore_errors=True)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Prompts of topics that are learnt from, and of those that are not."""
    path = tmp_path / "given.jsonl"
    lines = [{"prompt": f"{TOPICS[number % 3]} {number}"} for number in range(90)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def learn(model: str, tokens: int = 1000, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"engine": "llamacpp", "hours": 1.0, "prompts": [], "exclude": []}
    settings |= {"progress": QUIET, **options}
    return dict(command.learn(model, tokens=tokens, **settings).value)


def texts(report: dict[str, Any], pattern: str) -> list[str]:
    paths = sorted(Path(report["folder"]).glob(pattern))
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [line for line in lines if "about" not in json.loads(line)]


def test_a_model_learns_from_prompts_that_it_writes(tiny_files: ModelFiles):
    report = learn(tiny_files.name)
    prompts, answers = report["prompts"], report["answers"]
    assert answers["tokens"] >= 1000
    assert prompts["prompts"] == answers["answers"] == len(texts(report, "prompts-*.jsonl"))
    assert len(prompts["openings"]) > 5
    assert report["table"]["installed"] == bool(installed_drafters(tiny_files))
    seconds = report.pop("seconds")
    assert seconds > 0
    assert json.loads((Path(report["folder"]) / "report.json").read_text()) == report


def test_a_later_call_goes_on_and_repeats_nothing(tiny_files: ModelFiles, learning: list[Any]):
    first = learn(tiny_files.name, 500)
    learning.clear()
    again = learn(tiny_files.name, 500)
    assert learning == [], "there are enough answers already"
    assert again["answers"] == first["answers"]
    more = learn(tiny_files.name, 1500)
    assert more["answers"]["tokens"] >= 1500
    before, after = texts(first, "answers-*"), texts(more, "answers-*")
    assert len({*after}) == len(after) >= len(before)


def test_an_interrupted_call_keeps_what_it_made(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    whole = learn(tiny_files.name, 500)
    rmtree(learnt_dir())
    with monkeypatch.context() as patched:
        stream, streams = Model.stream, 0

        def interrupted(self: Model, prompt: Any, **options: Any) -> Stream:
            nonlocal streams
            streams += 1
            if streams == 12:
                raise KeyboardInterrupt
            return stream(self, prompt, **options)

        patched.setattr(Model, "stream", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learn(tiny_files.name, 500)
    resumed = learn(tiny_files.name, 500)
    assert resumed["answers"]["tokens"] >= 500
    assert {*texts(whole, "prompts-*.jsonl")} & {*texts(resumed, "prompts-*.jsonl")}


def test_prompts_of_the_user_are_answered_and_divided_by_topic(given: Path, tiny_files: ModelFiles):
    report = learn(tiny_files.name, 200, prompts=[given])
    answers = report["answers"]
    assert answers["answers"] >= 90
    assert 0 < answers["cooking and health"]["answers"] <= 60
    table = report["table"]
    sets = table["sets"].values()
    gains = [one["gain"] >= 1.01 and one["answers"] >= 8 for one in sets]
    assert table["installed"] == (gains == [True, True])


def test_a_model_without_a_template_goes_on_with_texts_that_it_begins(tmp_path: Path):
    base = str(write_tiny(tmp_path / "base.gguf", fields={"tokenizer.chat_template": None}))
    report = learn(base, 500)
    prompts = [json.loads(line)["prompt"] for line in texts(report, "prompts-*.jsonl")]
    first = json.loads(texts(report, "answers-*")[0])
    tokenizer = load(base).files.tokenizer()
    assert first["prompt"] == tokenizer.encode(prompts[first["number"]], special=True)


def test_a_template_without_an_opening_needs_prompts(given: Path, tmp_path: Path):
    template = "{{ messages[0].content }}"
    path = write_tiny(tmp_path / "odd.gguf", fields={"tokenizer.chat_template": template})
    with pytest.raises(ModelError, match="--prompts"):
        learn(str(path))
    assert [*learnt_dir().glob("*")] == []
    assert learn(str(path), 100, prompts=[given])["answers"]["answers"] == 90


def test_a_model_that_ends_no_prompt_is_refused(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline_lab.learn.prompts._MAX_UNUSED", 8)
    monkeypatch.setattr("paceline_lab.learn.prompts.LONGEST_PROMPT", 1)
    with pytest.raises(InvalidRequest, match="--prompts"):
        learn(tiny_files.name)


def test_a_model_that_has_changed_is_refused_by_its_name(tiny_files: ModelFiles):
    folder = LearntFolder(tiny_files).path
    with pytest.raises(ModelError, match=tiny_files.name):
        LearntFolder(replace(tiny_files, fingerprint="f" * 64))
    (folder / HEADER).write_text("{")
    with pytest.raises(ModelError, match="forget"):
        LearntFolder(tiny_files)


def test_a_disk_that_is_too_full_is_refused(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    usage = SimpleNamespace(free=10_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(InvalidRequest, match=r"10\.0 MB"):
        learn(tiny_files.name)


def test_learning_is_a_command_and_forgotten_by_another(
    tiny_files: ModelFiles, capsys: pytest.CaptureFixture[str]
):
    words = [tiny_files.name, "--tokens", "300", "--engine", "llamacpp"]
    assert get_command(app).main(words, standalone_mode=False) == 0
    out, said = capsys.readouterr()
    assert "answers with" in out
    assert "nothing of it leaves this machine" in said
    assert main(["forget", "--model", tiny_files.name, "--json"]) == 0
    (learnt,) = json.loads(capsys.readouterr().out)["learnt"]
    assert learnt["model"] == tiny_files.name
    assert learnt["bytes"] > 0
    assert [*learnt_dir().glob("*/*")] == []


# -- what is learnt from, and when it is installed ------------------------------------------------


def example(text: str, answer: Sequence[int], finish: str = "stop") -> Example:
    return Example([text], "free", Answer(0, [1], list(answer), finish))


def test_loops_and_answers_without_a_draft_are_left_out():
    looped = example("Say", [5, 6] * 60, "length")
    listed = example("Say", [5, 6] * 60)
    training, sets = divided(
        [looped, example("Say", [5, 6, 7], "loop"), listed, example("Hm", [5])]
    )
    assert [*training, *sets.held_out] == [listed]


def compared(gain: float, answers: int = 8) -> Comparison:
    return Comparison(answers, 1.5, 1.4, 1.3 * gain, 1.3)


@pytest.mark.parametrize(
    ("gains", "installed"),
    [([1.1, 1.02], True), ([1.1, 1.0], False), ([0.99, 1.5], False), ([1.5], False), ([], False)],
)
def test_a_drafter_is_installed_if_every_set_gains(gains: list[float], installed: bool):
    sets = Sets([], [])
    comparisons = dict(zip(sets.named, map(compared, gains), strict=False))
    assert is_gain(comparisons, sets) == installed
    few = dict(zip(sets.named, [compared(1.5), compared(1.5, 7)], strict=True))
    assert not is_gain(few, sets)
