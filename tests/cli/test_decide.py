"""`paceline decide`: questions from the command line and from a file, as a table and as JSON."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main

INPUT = "the rain in the one"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "input.txt").write_text(INPUT)
    (tmp_path / "wrong.json").write_text("{}")
    questions = [{"type": "predicate", "name": "rain", "instructions": "it rains"}]
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    return tmp_path


def decide(tiny_gguf: Path, *words: object) -> int:
    return main(["decide", "-m", str(tiny_gguf), "--threads", "1", "-q", *map(str, words)])


def test_decide_prints_a_table_or_json(
    files: Path, tiny_gguf: Path, model: Any, capsys: pytest.CaptureFixture[str]
):
    words = ("which?", "--choice", "rain", "--choice", "sun", "--file", files / "input.txt")
    more = ("--questions", files / "questions.json")
    assert decide(tiny_gguf, *words, *more, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    choices = [{"value": "rain"}, {"value": "sun"}]
    questions = [
        *json.loads((files / "questions.json").read_text()),
        {"type": "choice", "instructions": "which?", "choices": choices},
    ]
    assert value["answers"] == model.decide(INPUT, questions).as_dict()["answers"]
    assert decide(tiny_gguf, *words, *more) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["question", "answer", "option", "probability"]
    assert [row.split()[-2] for row in rows] == ["true", "false", "rain", "sun"]
    assert rows[0].split()[0] == "rain"


def test_decide_reads_text_from_a_pipe(
    tiny_gguf: Path, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(INPUT.encode())))
    assert decide(tiny_gguf, "how wet?", "--level", "dry", "--level", "wet") == 0
    levels = [{"label": "dry"}, {"label": "wet"}]
    question = {"type": "score", "instructions": "how wet?", "levels": levels}
    (answer,) = model.decide(INPUT, [question]).answers
    assert f"{answer.score:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "the question is missing"),
        (("--choice", "a"), "options need a question"),
        (("a?", "--choice", "a"), "questions[0].choices: expected a list of 2 to 255"),
        (("a?", "--choice", "a", "--level", "b"), "--choice and --level cannot be combined"),
        (("--questions", "wrong.json"), "should have a list of questions"),
        (("--questions", "-"), "- reads standard input"),
        (("a?", "--file", "missing.txt"), "cannot read missing.txt"),
    ],
)
def test_invalid_input_exits_with_2_before_loading_the_model(
    words: Any,
    says: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(files)
    assert main(["decide", "-m", "no-such-model", *words]) == 2
    assert says in capsys.readouterr().err
