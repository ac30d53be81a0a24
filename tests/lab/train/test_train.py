"""`train`: from prompts to a table, and mistakes on the way."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.storage.files import held


@pytest.fixture
def train(model: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a `train` command on the tiny model, in this process; returns what it says as JSON."""

    def train(*arguments: object) -> Any:
        options = ("--target", model.files.name, "--json", "--quiet")
        assert main(["train", *map(str, arguments), *options]) == 0
        out, said = capsys.readouterr()
        assert said == ""
        assert out.count("\n") == 1
        return json.loads(out)

    return train


@pytest.fixture
def train_refused(model: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a `train` command that must be refused: exit 2, and one line that says why."""

    def refused(*arguments: object) -> str:
        options = ("--target", model.files.name, "--quiet")
        assert main(["train", *map(str, arguments), *options]) == 2
        out, said = capsys.readouterr()
        assert out == ""
        assert said.startswith("paceline")
        assert said.count("\n") == 1
        return said

    return refused


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    words = ["this is one and the user", "Hello", "zebra"]
    path.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    return path


def test_from_prompts_to_answers_to_a_table_that_drafts(
    train: Any, tmp_path: Path, model: Any, capsys: pytest.CaptureFixture[str]
):
    made, said, table = tmp_path / "made.jsonl", tmp_path / "answers", tmp_path / "table"
    # So hot that the tiny model comes to an end in some hundred tokens.
    found = train("prompts", "--out", made, "--count", 3, "--temperature", 5, "--at-once", 8)
    assert found == {"prompts": 3, "file": str(made)}
    assert len(made.read_text().splitlines()) == 3

    found = train("answers", "--prompts", made, "--out", said, "--max-tokens", 20, "--at-once", 2)
    assert found == json.loads((said / "manifest.json").read_text())
    assert (found["answers"], found["answer_tokens"], found["complete"]) == (3, 60, True)

    found = train("table", "--data", said, "--out", table)
    manifest = json.loads((table / "manifest.json").read_text())
    assert found["folder"] == str(table)
    assert found["entries"] == manifest["entries"] > 0
    assert (found["answers"], found["answer_tokens"]) == (2, 40)
    assert found["held_out"]["tokens"] == 20
    assert found["held_out"] == manifest["held_out"]
    assert manifest["target"] == model.files.name

    asked = ("Hello", "--model", model.files.name, "--max-tokens", "20", "--json", "--quiet")
    assert main(["generate", *asked, "--drafter", f"suffix+table:{table}"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == model.generate("Hello", max_tokens=20).token_ids


def test_answers_take_settings_and_go_on_in_the_same_folder(
    train: Any, train_refused: Any, prompts: Path, tmp_path: Path
):
    out = tmp_path / "answers"
    common = ("answers", "--prompts", prompts, "--out", out, "--max-tokens", 5, "--at-once", 2)
    hot = ("--temperature", 0, "--temperature", 0.8, "--seed", 7)
    found = train(*common, *hot)
    assert (found["temperatures"], found["seed"], found["max_tokens"]) == ([0.0, 0.8], 7, 5)
    assert found["answers"] == 3
    assert train(*common, *hot) == found
    assert "answers with another temperatures" in train_refused(*common, "--seed", 7)


def test_a_table_has_no_more_entries_than_fit(train: Any, prompts: Path, tmp_path: Path):
    said = tmp_path / "answers"
    train("answers", "--prompts", prompts, "--out", said, "--max-tokens", 60, "--at-once", 3)
    found = train("table", "--data", said, "--out", tmp_path / "table", "--megabytes", 70e-6)
    assert found["entries"] == 10
    twice = train("table", "--data", said, "--data", said, "--out", tmp_path / "twice")
    assert twice["answers"] == 5


def test_training_says_for_people_what_it_made(
    model: Any, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said, table = tmp_path / "answers", tmp_path / "table"
    common = ("--target", model.files.name)
    options = ("--prompts", prompts, "--out", said, "--max-tokens", 5, "--at-once", 2)
    assert main([*map(str, ("train", "answers", *common, *options))]) == 0
    out, log = capsys.readouterr()
    assert out == f"3 answers, 15 tokens, in {said}\n"
    assert log.endswith(f"answers of {model.files.name}\n")
    assert main([*map(str, ("train", "table", *common, "--data", said, "--out", table))]) == 0
    out, log = capsys.readouterr()
    assert f"entries in {table}; of held-out tokens it predicts" in out
    assert log == "counting 10 tokens\n"


def test_training_has_help(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("prompts", "answers", "table"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "Missing command"),
        ("dance", "dance"),
        ("prompts", "Missing option '--out'"),
        ("answers --out x", "Missing option '--prompts'"),
        ("prompts --out x --count 0", "'0' is not a whole number of 1 or more"),
        ("answers --out x --prompts y --at-once 0", "'0' is not a whole number of 1 or more"),
        ("answers --out x --prompts y --max-tokens -1", "'-1' is not a whole number of 1 or more"),
        ("answers --out x --prompts y --temperature hot", "'hot' is not a number"),
        ("table --out x --data y --megabytes big", "'big' is not a number"),
    ],
)
def test_a_mistake_in_a_train_command_is_one_line_that_names_it(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", *arguments.split()]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert reason in said
    assert said.startswith("paceline train")
    assert said.count("\n") == 1


def test_prompts_that_cannot_be_answered_are_named(
    train_refused: Any, prompts: Path, tmp_path: Path
):
    out, missing, broken = (tmp_path / name for name in ("out", "missing", "broken.jsonl"))
    options = ("--out", out, "--max-tokens", 5, "--at-once", 1)
    broken.write_text(prompts.read_text() + "{\n")
    for path, reason in (
        (missing, f"cannot read {missing}"),
        (tmp_path, f"cannot read {tmp_path}"),
        (broken, f"line 4 of {broken}"),
    ):
        assert reason in train_refused("answers", "--prompts", path, *options)
    assert not out.exists()


def test_folders_without_answers_are_named(train_refused: Any, tmp_path: Path):
    out = tmp_path / "out"
    for folder in (tmp_path, tmp_path / "missing"):
        said = train_refused("table", "--data", folder, "--out", out)
        assert f"{folder} has no answers to train on; make them with `paceline train" in said
    assert not out.exists()


def test_files_that_cannot_take_prompts_are_named(
    train_refused: Any, prompts: Path, tmp_path: Path
):
    missing = tmp_path / "missing" / "made.jsonl"
    for path, reason in (
        (prompts, f"line 1 of {prompts}: seed: "),
        (missing, f"cannot write {missing}"),
    ):
        assert reason in train_refused("prompts", "--count", 1, "--at-once", 1, "--out", path)


def test_a_target_that_is_not_there_is_refused(
    prompts: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    options = ("--prompts", prompts, "--out", tmp_path / "out", "--target", "gpt-9")
    assert main([*map(str, ("train", "answers", *options))]) == 2
    assert "no model is called 'gpt-9'" in capsys.readouterr().err


def test_answers_of_other_weights_are_no_data_for_a_table(
    train: Any, train_refused: Any, prompts: Path, tmp_path: Path
):
    said = tmp_path / "answers"
    train("answers", "--prompts", prompts, "--out", said, "--max-tokens", 5, "--at-once", 2)
    manifest = json.loads((said / "manifest.json").read_text())
    (said / "manifest.json").write_text(json.dumps({**manifest, "fingerprint": "f" * 64}))
    found = train_refused("table", "--data", said, "--out", tmp_path / "table")
    assert f"the answers in {said} are those of" in found
    assert "with other weights than this target's" in found
    assert not (tmp_path / "table").exists()


def test_a_table_may_be_made_of_prompts_at_once(train: Any, prompts: Path, tmp_path: Path):
    table = tmp_path / "table"
    found = train("table", "--prompts", prompts, "--out", table)
    assert found["entries"] > 0
    assert (table / "answers" / "answers.jsonl").exists()


@pytest.mark.reference
@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (("--rate", 0), "argument --rate: "),
        (("--depth", 0), "argument --depth: "),
        (("--dropout", 1), "argument --dropout: "),
        (("--shallow", 1.5), "argument --shallow: "),
        (("--vocab", 0), "argument --vocab: "),
        (("--device", "tpu"), "there is no device tpu here"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_data_is_made(
    option: Any, reason: str, train_refused: Any, prompts: Path, tmp_path: Path
):
    pytest.importorskip("torch")
    out = tmp_path / "head"
    assert reason in train_refused("mtp", "--prompts", prompts, "--out", out, *option)
    assert not out.exists()


@pytest.mark.reference
@pytest.mark.parametrize("form", [(), ("--logits",)], ids=["eagle3", "logits"])
def test_a_head_is_trained_on_answers_and_training_continues(
    form: tuple[str, ...],
    train: Any,
    train_refused: Any,
    prompts: Path,
    tmp_path: Path,
    model: Any,
    capsys: pytest.CaptureFixture[str],
):
    for package in ("torch", "matplotlib"):
        pytest.importorskip(package)
    said, out = tmp_path / "answers", tmp_path / "head"
    train("answers", "--prompts", prompts, "--out", said, "--max-tokens", 12, "--at-once", 2)
    options = ("--data", said, "--out", out, "--vocab", 16, "--texts", 1, "--evaluate-every", 1)
    options += form
    found = train("mtp", *options, "--steps", 2)
    assert found["folder"] == str(out)
    assert found["tau"] == found["curve"][-1]["tau"] >= 1
    with held(out):  # as another run does
        assert f"{out} is being written by another run" in train_refused(
            "mtp", *options, "--steps", 3
        )
    longer = train("mtp", *options, "--steps", 3)
    assert longer["steps"] == 3
    assert longer["curve"][:2] == found["curve"]
    names = {"config.json", "model.safetensors", "curve.json", "curve.png", "state.pt", "features"}
    assert names <= {path.name for path in out.iterdir()}
    drafted, plain = (
        answer_of(model, capsys, "--drafter", spec) for spec in (f"mtp:{out}", "none")
    )
    assert drafted["token_ids"] == plain["token_ids"]


def answer_of(model: Any, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    given = ("--model", model.files.name, "--max-tokens", "12", "--temperature", "0", "--json")
    assert main(["generate", "Hello", *given, *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_training_without_torch_says_what_to_install(
    train_refused: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torch", None)
    said = train_refused("mtp", "--prompts", prompts, "--out", tmp_path / "head")
    assert "pip install 'paceline[train]'" in said


def test_there_must_be_something_to_learn_from(train_refused: Any, tmp_path: Path):
    said = train_refused("table", "--out", tmp_path / "table")
    assert "give --data ANSWERS or --prompts FILE" in said


@pytest.mark.parametrize("size", ["0", "-1", "nan"])
def test_a_table_of_no_size_is_refused(
    size: str, train: Any, train_refused: Any, prompts: Path, tmp_path: Path
):
    said = tmp_path / "answers"
    train("answers", "--prompts", prompts, "--out", said, "--max-tokens", 5, "--at-once", 2)
    options = ("--data", said, "--out", tmp_path / "table", f"--megabytes={size}")
    assert "megabytes" in train_refused("table", *options)


def test_a_single_answer_is_too_few_for_a_table(
    train: Any, train_refused: Any, tmp_path: Path, prompts: Path
):
    said = tmp_path / "answers"
    prompts.write_text('{"prompt": "Hello"}\n')
    train("answers", "--prompts", prompts, "--out", said, "--max-tokens", 30, "--at-once", 1)
    assert f"{said}" in train_refused("table", "--data", said, "--out", tmp_path / "table")


def test_a_table_is_not_written_over_answers(
    train: Any, train_refused: Any, prompts: Path, tmp_path: Path
):
    said = tmp_path / "answers"
    train("answers", "--prompts", prompts, "--out", said, "--max-tokens", 30, "--at-once", 2)
    before = {path: path.read_bytes() for path in said.iterdir()}
    assert f"{said}" in train_refused("table", "--data", said, "--out", said)
    assert {path: path.read_bytes() for path in said.iterdir()} == before


@pytest.mark.parametrize("command", ["answers", "table"])
def test_an_output_folder_that_cannot_be_made_is_refused(
    command: str, train: Any, train_refused: Any, prompts: Path, tmp_path: Path
):
    said, out = tmp_path / "answers", tmp_path / "file"
    out.write_text("")
    if command == "table":
        train("answers", "--prompts", prompts, "--out", said, "--max-tokens", 30, "--at-once", 2)
        assert f"{out}" in train_refused("table", "--data", said, "--out", out)
    else:
        options = ("--max-tokens", 5, "--at-once", 2)
        assert f"{out}" in train_refused("answers", "--prompts", prompts, "--out", out, *options)
