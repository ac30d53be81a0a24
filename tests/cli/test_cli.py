import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.models import DEFAULT_MODEL, list_models
from paceline.models.cache import models_dir
from paceline.models.manifest import GRAPH, WEIGHTS
from support.tiny import SIZES, write_tiny
from support.waiting import PATIENCE

COMMAND = [sys.executable, "-m", "paceline"]
LONG = {**SIZES, "context": 200_000}  # answers that last until they are stopped

Run = Callable[..., "subprocess.CompletedProcess[Any]"]


@pytest.fixture
def environment(cache: Path, tiny_model: Any, tmp_path: Path) -> dict[str, str]:
    """The tests' cache, no hub and no package index."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PIP_NO_INDEX": "1"}
    return {**os.environ, **offline}


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    def run(*arguments: object, **options: Any) -> Any:
        options = {"text": True, "env": environment, "stdin": subprocess.DEVNULL, **options}
        if "input" in options:
            del options["stdin"]
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True,
            check=False,
            timeout=PATIENCE,
            **options,
        )

    return run


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Runs a command that must be refused: exit 2, and one line that says why."""

    def refused(*arguments: object, code: int = 2, **options: Any) -> str:
        found = run(*arguments, **options)
        said = found.stderr if isinstance(found.stderr, str) else found.stderr.decode()
        assert found.returncode == code, said
        assert "Traceback" not in said
        lines = [line for line in said.splitlines() if line.startswith("paceline")]
        assert len(lines) == 1, said
        assert said.endswith(f"{lines[0]}\n"), "nothing after it"
        return lines[0]

    return refused


@pytest.fixture
def answer(run: Run, tiny_gguf: Path) -> Run:
    def answer(*arguments: object, **options: Any) -> Any:
        return run("generate", "--model", tiny_gguf, *arguments, **options)

    return answer


@pytest.fixture(scope="session")
def endless_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("endless") / "endless.gguf", sizes=LONG)


def status(arguments: list[str]) -> Any:
    """What a command exits with, in this process."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


# -- answers ---------------------------------------------------------------------------------------


def test_an_answer_goes_to_standard_output_and_all_else_to_standard_error(answer: Run, model: Any):
    found = answer("Hello", "--max-tokens", 20)
    assert found.returncode == 0
    assert found.stdout == model.generate("Hello", max_tokens=20).text + "\n"
    assert "20 tokens" in found.stderr
    assert answer("Hello", "--max-tokens", 20, "--quiet").stderr == ""


STATS = {
    *("steps", "drafted", "accepted", "acceptance_rate", "tokens_per_step", "load_seconds"),
    *("prefill_seconds", "decode_seconds", "draft_seconds", "verify_seconds", "host_seconds"),
    "decode_tokens_per_second",
}


def test_an_answer_as_json_has_all_of_the_result(answer: Run, model: Any):
    found = answer("Hello", "--max-tokens", 20, "--json", "--drafter", "ngram", "--probe", "suffix")
    value = json.loads(found.stdout)
    assert value.keys() >= {
        *("text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "engine"),
        *("drafter", "exact", "stats", "seed", "model", "policy"),
    }
    assert value["stats"].keys() >= STATS
    assert value["token_ids"] == model.generate("Hello", max_tokens=20).token_ids
    assert (value["completion_tokens"], value["finish_reason"]) == (20, "length")
    assert (value["engine"], value["drafter"], value["exact"]) == ("openvino", "ngram", True)
    assert value["stats"]["probe"]["suffix"]["steps"] > 0


def test_a_prompt_comes_as_argument_file_or_on_standard_input(answer: Run, tmp_path: Path):
    prompt = "naïve 漢字\nsecond line"
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    options = ("--max-tokens", 5, "--json")
    values = [
        json.loads(found.stdout)
        for found in (
            answer(prompt, *options),
            answer("--file", tmp_path / "prompt.txt", *options),
            answer(*options, input=prompt),
            answer("-", *options, input=prompt),
        )
    ]
    assert len({value["prompt_tokens"] for value in values}) == 1
    assert all(value["token_ids"] == values[0]["token_ids"] for value in values)


def test_what_the_answer_may_be_comes_from_a_file(answer: Run, tmp_path: Path):
    options = ("Hello", "--max-tokens", 30, "--json")
    plain = json.loads(answer(*options, "--drafter", "none").stdout)
    expected = tmp_path / "expected.txt"
    expected.write_text(plain["text"], encoding="utf-8")
    found = json.loads(answer(*options, "--prediction", expected).stdout)
    assert found["token_ids"] == plain["token_ids"]
    assert found["drafter"].startswith("prediction+")


def test_options_reach_the_model(answer: Run, model: Any):
    options: Any = {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "seed": 7,
        "max_tokens": 30,
        "max_block": 4,
        "policy": "kelly",
        "drafter": "suffix+ngram",
    }
    given = [
        str(part)
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", value)
    ]
    bias = ("--logit-bias", "2=-100", "--logit-bias", "40=-3", "--ignore-eos", "--stop", "zzzz")
    found = answer("Hello", *given, *bias, "--json")
    expected = model.generate(
        "Hello", **options, logit_bias={2: -100.0, 40: -3.0}, ignore_eos=True, stop="zzzz"
    )
    value = json.loads(found.stdout)
    assert value["token_ids"] == expected.token_ids
    assert (value["policy"], value["seed"]) == ("kelly", 7)


def test_a_system_message_and_a_raw_prompt(answer: Run, model: Any):
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
    with_system = json.loads(answer("Hi", "--system", "Be", "--json", "--max-tokens", 3).stdout)
    assert with_system["token_ids"] == model.generate(messages, max_tokens=3).token_ids
    raw = json.loads(answer("Hi", "--raw", "--json", "--max-tokens", 3).stdout)
    assert raw["prompt_tokens"] == len(model.tokens("Hi", raw=True))


def test_a_chat_answers_line_by_line_and_ends_with_the_input(run: Run, tiny_gguf: Path, model: Any):
    found = run("chat", "--model", tiny_gguf, "--max-tokens", 5, "--json", input="Hello\nand\n")
    first, second = (json.loads(line) for line in found.stdout.splitlines())
    assert found.returncode == 0
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "and"},
    ]
    assert second["token_ids"] == model.generate(messages, max_tokens=5).token_ids
    assert second["stats"]["cached_tokens"] > 0
    plain = run("chat", "--model", tiny_gguf, "--max-tokens", 5, "--quiet", input="Hello\n\nnot")
    assert plain.stdout == first["text"] + "\n", "an empty line ends it"
    assert plain.stderr == ""


# -- the other commands ----------------------------------------------------------------------------


def test_pull_makes_a_model_ready_and_says_where(run: Run, tiny_gguf: Path, tiny_files: Any):
    found = run("pull", tiny_gguf)
    assert found.stdout == f"{tiny_gguf} is ready in {tiny_files.folder}\n"
    value = json.loads(run("pull", tiny_gguf, "--json").stdout)
    assert value == {
        "name": str(tiny_gguf),
        "folder": str(tiny_files.folder),
        "source": tiny_files.source,
        "license": "cc0-1.0",
        "context_length": 512,
    }


def test_models_are_listed_for_people_and_as_json(run: Run, cache: Path, tiny_files: Any):
    value = json.loads(run("models", "--json").stdout)
    names = {model.name for model in list_models(cache)}
    assert {each["name"] for each in value} == names >= {DEFAULT_MODEL, tiny_files.name}
    (mine,) = (each for each in value if each["name"] == tiny_files.name)
    assert mine["here"]
    assert mine["folder"] == str(tiny_files.folder)
    for each in mine["exactness"]:
        assert each["engine"]["engine"] == "openvino"
        assert each["conditions"]["block_length"]["rows"] > 0
    text = run("models").stdout
    assert DEFAULT_MODEL in text
    assert "not here" in text


def test_a_check_of_models_fails_with_exit_1(
    run: Run, refused: Any, tiny_gguf: Path, tmp_path: Path, environment: dict[str, str]
):
    environment["PACELINE_CACHE"] = str(tmp_path / "cache")
    assert run("pull", tiny_gguf).returncode == 0
    assert json.loads(run("models", "--check", "--json").stdout) == {"checked": 1}
    (folder,) = models_dir(tmp_path / "cache").iterdir()
    os.truncate(folder / WEIGHTS, 1000)
    assert f"{WEIGHTS} has 1000 bytes" in refused("models", "--check", code=1)
    assert "cannot be used" in refused("generate", "x", "--model", tiny_gguf)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    message = {"role": "user", "content": "this is one and the user"}
    path.write_text(json.dumps({"id": "one", "kind": "chat", "messages": [message]}))
    return path


def test_a_bench_run_prints_tables_or_json_and_writes_what_it_prints(
    run: Run, tiny_gguf: Path, suite: Path, tmp_path: Path
):
    common = ("--model", tiny_gguf, "--suite", suite, "--max-tokens", 20, "--rounds", 1)
    out = tmp_path / "result.json"
    out.write_text("older")
    found = run("bench", "run", *common, "--drafter", "suffix", "--json", "--output", out)
    assert found.returncode == 0, found.stderr
    value = json.loads(found.stdout)
    assert value["summary"]["same_tokens"]
    assert json.loads(out.read_text()) == value
    assert {path.name for path in tmp_path.iterdir()} <= {"result.json", "suite.jsonl", "hub"}
    text = run("bench", "run", *common).stdout
    assert "geometric means" in text
    assert "worst prompt" in text


def test_a_plan_prints_tables_or_json(run: Run, tiny_gguf: Path):
    value = json.loads(run("plan", "--model", tiny_gguf, "--json").stdout)
    assert value["row_invariant"]
    assert "break-even" in run("plan", "--model", tiny_gguf).stdout


@pytest.mark.slow
def test_a_verification_passes_and_as_json_says_what_was_compared(
    run: Run, tiny_gguf: Path, suite: Path
):
    found = run(
        *("verify", "--model", tiny_gguf, "--suite", suite, "--max-tokens", 3),
        *("--cache-tokens", 4096, "--json", "--quiet"),
    )
    assert found.returncode == 0, found.stderr
    value = json.loads(found.stdout)
    assert value["exact"]
    assert value["rows_compared"] > 400
    assert value["answers_compared"] > 100


def test_help_and_version_are_no_errors(run: Run):
    assert run("--version").stdout.startswith("paceline ")
    for command in ("pull", "models", "convert", "generate", "chat", "bench", "verify", "plan"):
        found = run(command, "--help")
        assert found.returncode == 0
        assert f"paceline {command}" in found.stdout


# -- training --------------------------------------------------------------------------------------


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
        assert status(["train", *map(str, arguments), *options]) == 2
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
    assert log == f"answers of {model.files.name}\n"
    assert main([*map(str, ("train", "table", *common, "--data", said, "--out", table))]) == 0
    out, log = capsys.readouterr()
    assert f"entries in {table}; of tokens it never saw it names" in out
    assert log == "counting 10 tokens\n"


def test_training_has_help(run: Run):
    found = run("train", "--help")
    assert found.returncode == 0
    assert all(word in found.stdout for word in ("prompts", "answers", "table"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "required: command"),
        ("dance", "dance"),
        ("prompts", "required: --out"),
        ("answers --out x", "required: --prompts"),
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
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments.split()])
    assert caught.value.code == 2
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
        assert f"{folder} has no answers to learn from; make them with `paceline train" in said
    assert not out.exists()


def test_files_that_cannot_take_prompts_are_named(
    train_refused: Any, prompts: Path, tmp_path: Path
):
    missing = tmp_path / "missing" / "made.jsonl"
    for path, reason in (
        (prompts, f"{prompts} is not valid; expected prompt (str)"),
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
        (("--block", 1), "block is 1; expected 2 rows or more"),
        (("--rate", 0), "argument --rate: "),
        (("--gamma", 0), "argument --gamma: "),
        (("--device", "tpu"), "there is no device tpu here"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_data_is_made(
    option: Any, reason: str, train_refused: Any, prompts: Path, tmp_path: Path
):
    pytest.importorskip("torch")
    out = tmp_path / "drafter"
    assert reason in train_refused("dflash", "--prompts", prompts, "--out", out, *option)
    assert not out.exists()


def test_training_without_torch_says_what_to_install(
    train_refused: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torch", None)
    said = train_refused("dflash", "--prompts", prompts, "--out", tmp_path / "drafter")
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


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "required"),
        (("dance",), "dance"),
        (("bench",), "required"),
        (("bench", "dance"), "dance"),
        (("generate", "a", "b"), "unrecognized arguments: b"),
        (("generate", "--nonsense"), "--nonsense"),
        (("generate", "x", "--max-tokens", "many"), "'many' is not a whole number"),
        (("generate", "x", "--temperature", "hot"), "'hot' is not a number"),
        (("generate", "x", "--seed", "1.5"), "'1.5' is not a whole number"),
        (("generate", "x", "--logit-bias", "5"), "'5' is not TOKEN=BIAS, as in 42=-5"),
        (("generate", "x", "--logit-bias", "a=b"), "'a' is not a whole number"),
        (("bench", "run", "--rounds", "0"), "'0' is not a whole number of 1 or more"),
        (("bench", "run", "--per-kind", "-3"), "'-3' is not a whole number of 1 or more"),
        (("bench", "run", "--rounds", "x"), "'x' is not a whole number"),
        (("verify", "--max-tokens", "0"), "'0' is not a whole number of 1 or more"),
        (("convert",), "source"),
        (("convert", "x", "--weights", "int2"), "invalid choice: 'int2'"),
        (("convert", "x", "--to", "paper"), "invalid choice: 'paper'"),
        (("convert", "x", "--rows", "4"), "--rows: only with --to coreml"),
        (("convert", "x", "--taps", "all", "--head-rows", "9"), "--head-rows, --taps: only with"),
        (
            ("convert", "x", "--to", "coreml", "--rows", "0"),
            "'0' is not a whole number of 1 or more",
        ),
        (("convert", "x", "--to", "coreml", "--taps", "a"), "'a' is not a whole number"),
        (("coreml", "lint"), "artifact"),
        (("generate", "x", "--engine", "abacus"), "no engine is called 'abacus'"),
        (("generate", "x", "--engine", "coreml"), f"{DEFAULT_MODEL} has no Core ML form here"),
        (("convert", "./nowhere"), "neither a folder nor a hub name"),
        (("pull", "gpt-9"), "no model is called 'gpt-9'"),
        (("generate", "x", "--model", "smolm2-135m"), f"did you mean {DEFAULT_MODEL}?"),
        (("generate", "x", "--model", "/no/such.gguf"), "there is no file or folder"),
        (("generate", "x", "--model", "owner/name"), "hub cannot be reached"),
        (("pull", "a--b/c"), "not a hub name"),
        (("generate", "x", "--model", "x" * 300), "File name too long"),
        (("generate", "x", "--file", "y"), "not both"),
        (("generate", "--file", "/no/such/file"), "cannot read /no/such/file"),
        (("generate", "--file", "/"), "cannot read /"),
        (("generate", "x", "--raw", "--system", "y"), "--system needs the chat template"),
        (("bench", "run", "--suite", "/no/suite"), "cannot read /no/suite"),
        (("bench", "run", "--kind", "poem"), "no prompt is of kind 'poem'"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments: tuple[str, ...], reason: str, refused: Any):
    assert reason in refused(*arguments)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--max-tokens", "0"), "argument --max-tokens: "),
        (("--max-tokens", "-5"), "argument --max-tokens: "),
        (("--temperature", "-1"), "argument --temperature: "),
        (("--temperature", "nan"), "argument --temperature: "),
        (("--temperature", "inf"), "argument --temperature: "),
        (("--top-k", "-1"), "argument --top-k: "),
        (("--top-p", "0"), "argument --top-p: "),
        (("--top-p", "1.5"), "argument --top-p: "),
        (("--min-p", "2"), "argument --min-p: "),
        (("--repetition-penalty", "0"), "argument --repetition-penalty: "),
        (("--presence-penalty", "1000"), "argument --presence-penalty: "),
        (("--frequency-penalty", "nan"), "argument --frequency-penalty: "),
        (("--seed", "-1"), "argument --seed: "),
        (("--seed", str(2**64)), "argument --seed: "),
        (("--logit-bias=-1=5",), "argument --logit-bias: "),
        (("--logit-bias", "5=nan"), "argument --logit-bias: "),
        (("--logit-bias", "99999=1"), "logit_bias names token 99999"),
        (("--stop", ""), "stop string is empty"),
        (("--drafter", "magic"), "no drafter is called 'magic'"),
        (("--drafter", "ngram:min=0"), "ngram"),
        (("--drafter", ""), "no drafter is called ''"),
        (("--probe", "magic"), "no drafter is called 'magic'"),
        (("--policy", "best"), "policy is 'best'; expected auto"),
        (("--max-block", "1"), "argument --max-block: "),
        (("--max-block", "33"), "argument --max-block: "),
        (("--rows", "0"), "argument --rows: "),
        (("--rows", "3"), "argument --rows: "),
        (("--cache-tokens", "0"), "argument --cache-tokens: "),
        (("--cache-tokens", "-7"), "argument --cache-tokens: "),
        (("--cache-tokens", str(2**31 - 1)), "set cache_tokens lower"),
        (("--cache-tokens", str(10**30)), "argument --cache-tokens: "),
        (("--threads", "0"), "argument --threads: "),
        (("--threads", str(10**12)), "argument --threads: "),
        (("--engine", "magic"), "no engine is called 'magic'; expected openvino"),
    ],
)
def test_a_value_out_of_range_is_one_line_that_names_it(
    options: tuple[str, ...], reason: str, model: Any, capsys: pytest.CaptureFixture[str]
):
    # In this process: thirty loads of OpenVINO would show nothing more.
    assert status(["generate", "Hello", "--model", model.files.name, "--quiet", *options]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert reason in said
    assert said.startswith("paceline")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--drafter", "magic"), "no drafter is called 'magic'"),
        (("--policy", "best"), "policy is 'best'"),
        (("--output", "/no/such/folder/x.json"), "cannot write /no/such/folder/x.json"),
        (("--output", "/"), "cannot write /"),
        (("--suite", "/"), "cannot read /"),
        (("--threads", "0"), "argument --threads: "),
    ],
)
def test_a_mistake_in_a_bench_run_is_found_before_anything_is_measured(
    options: tuple[str, ...], reason: str, run: Run, tiny_gguf: Path, suite: Path
):
    found = run("bench", "run", "--model", tiny_gguf, "--suite", suite, *options)
    assert found.returncode == 2
    assert reason in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["verify", "bench run"])
def test_an_output_that_cannot_be_written_is_found_before_the_work(
    command: str, run: Run, tiny_gguf: Path, suite: Path, tmp_path: Path
):
    out = tmp_path / "missing" / "out.json"
    found = run(*command.split(), "--model", tiny_gguf, "--suite", suite, "--output", out)
    assert found.returncode == 2
    assert (
        found.stderr == f"paceline: cannot write {out}: {out.parent} is not a folder to write to\n"
    )


def test_a_model_that_cannot_be_fetched_is_one_line(
    refused: Any, environment: dict[str, str], tmp_path: Path
):
    environment["PACELINE_CACHE"] = str(tmp_path / "cache")
    assert f"cannot fetch {DEFAULT_MODEL}" in refused("generate", "x")
    assert not [*models_dir(tmp_path / "cache").iterdir()]


def test_an_empty_prompt_is_refused_wherever_it_comes_from(
    refused: Any, tiny_gguf: Path, tmp_path: Path
):
    (tmp_path / "empty").write_text("")
    common = ("generate", "--model", tiny_gguf)
    assert "prompt is empty" in refused(*common, "")
    assert "prompt is empty" in refused(*common, "--raw", "")
    assert "prompt is empty" in refused(*common, "--file", tmp_path / "empty")
    assert "prompt is empty" in refused(*common, input="")


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(
    refused: Any, tiny_gguf: Path
):
    said = refused("generate", "--model", tiny_gguf, input="x " * 3000)
    assert "tokens and the context holds 512" in said


def test_a_prompt_that_does_not_fit_the_cache_is_refused(refused: Any, tiny_gguf: Path):
    said = refused("generate", "--model", tiny_gguf, "--cache-tokens", 32, input="x " * 100)
    assert "cache_tokens" in said


def test_bytes_that_are_no_text_are_refused(
    refused: Any, tiny_gguf: Path, tmp_path: Path, environment: dict[str, str]
):
    common = ("generate", "--model", tiny_gguf)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    assert "is not UTF-8 text" in refused(*common, "--file", tmp_path / "bytes")
    said = refused(*common, input=b"a\xff\xfe", text=False)
    assert "not UTF-8 text" in said or "not valid Unicode" in said
    # Where the locale says nothing, Python lets such bytes through as lone surrogates.
    environment.update({"LC_ALL": "C", "PYTHONUTF8": "1"})
    said = refused(*common, input=b"a\xff\xfe", text=False)
    assert "not UTF-8 text" in said or "not valid Unicode" in said
    assert "not valid Unicode" in refused(*common, os.fsdecode(b"a\xff"))


@pytest.mark.parametrize("command", ["generate", "pull", "plan", "chat", "verify"])
@pytest.mark.parametrize("kind", ["foreign", "truncated", "empty", "folder"])
def test_a_file_that_is_no_model_is_refused_by_every_command(
    command: str, kind: str, refused: Any, tiny_files: Any, tmp_path: Path
):
    path = tmp_path / "bad.gguf"
    cache = tiny_files.folder.parents[1]
    content = Path(tiny_files.name).read_bytes()
    if kind == "folder":
        path.mkdir()
    else:
        path.write_bytes({"foreign": b"%PDF-1.7", "truncated": content[:-99], "empty": b""}[kind])
    before = {*models_dir(cache).iterdir()}
    where = [path] if command == "pull" else ["--model", path]
    said = refused(command, *where, *(["x"] if command == "generate" else []))
    assert str(path) in said
    assert {*models_dir(cache).iterdir()} == before


def test_an_openvino_folder_with_a_cut_off_piece_is_refused(
    refused: Any, tiny_files: Any, tmp_path: Path
):
    import shutil

    for piece in (GRAPH, WEIGHTS):
        folder = tmp_path / piece
        shutil.copytree(tiny_files.folder, folder)
        os.truncate(folder / piece, 500)
        assert f"{piece} has 500 bytes" in refused("generate", "x", "--model", folder)


def test_a_cache_folder_that_cannot_be_made_is_refused(
    refused: Any, tiny_gguf: Path, tmp_path: Path, environment: dict[str, str]
):
    (tmp_path / "file").write_text("")
    environment["PACELINE_CACHE"] = str(tmp_path / "file")
    assert "$PACELINE_CACHE" in refused("pull", tiny_gguf)


def test_without_the_extra_convert_says_which(refused: Any, tmp_path: Path):
    import importlib.util

    if importlib.util.find_spec("optimum"):
        pytest.skip("it is installed here")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert "pip install 'paceline[convert]'" in refused("convert", tmp_path)


def test_text_that_the_terminal_cannot_show_is_no_crash(
    answer: Run, environment: dict[str, str], tmp_path: Path
):
    environment.update({"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    # The token of a byte that is no ASCII.
    found = answer("Hello", "--max-tokens", 5, "--logit-bias", "200=1000")
    assert found.returncode == 0, found.stderr
    assert found.stdout == "?????\n"


# -- stopped in the middle -------------------------------------------------------------------------


@contextlib.contextmanager
def started(environment: dict[str, str], *arguments: object, **options: Any) -> Iterator[Any]:
    """A command at work, in a process group of its own as a terminal would have it."""
    child = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, **options},
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def stopped_line(said: bytes) -> None:
    lines = [line for line in said.decode().splitlines() if line.startswith("paceline")]
    assert lines == ["paceline: stopped"]
    assert b"Traceback" not in said
    assert said.endswith(b"paceline: stopped\n")


def test_ctrl_c_ends_an_answer_with_one_line(environment: dict[str, str], endless_gguf: Path):
    with started(environment, "generate", "x", "--model", endless_gguf, "--ignore-eos") as child:
        assert child.stdout.read(40)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    stopped_line(said)


def wait_for(stream: Any, word: bytes) -> bytes:
    """Read lines until one has `word`."""
    heard = b""
    for line in stream:
        heard += line
        if word in line:
            return heard
    raise AssertionError(heard)


def test_ctrl_c_ends_a_chat_that_is_read_from_a_pipe(
    environment: dict[str, str], endless_gguf: Path
):
    with started(
        environment, "chat", "--model", endless_gguf, "--ignore-eos", stdin=subprocess.PIPE
    ) as child:
        child.stdin.write(b"Hello\n")
        child.stdin.flush()
        assert child.stdout.read(40)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    stopped_line(said)


def test_ctrl_c_at_a_terminal_ends_the_answer_and_the_chat_goes_on(
    environment: dict[str, str], endless_gguf: Path
):
    terminal, inner = pty.openpty()
    with started(
        environment, "chat", "--model", endless_gguf, "--ignore-eos", stdin=inner
    ) as child:
        os.write(terminal, b"Hello\n")
        assert child.stdout.read(40)
        os.killpg(child.pid, signal.SIGINT)
        heard = wait_for(child.stderr, b"tokens per step")
        assert b"Traceback" not in heard
        os.write(terminal, b"more\n")
        rest = child.stdout.read(200)
        assert rest
        os.killpg(child.pid, signal.SIGINT)
        wait_for(child.stderr, b"tokens per step")
        os.write(terminal, b"\n")  # an empty line
        child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    os.close(terminal)
    os.close(inner)


@pytest.mark.parametrize("whole_group", [True, False], ids=["at a terminal", "by kill"])
def test_ctrl_c_while_a_model_is_fetched_leaves_nothing_and_nobody(
    whole_group: bool, environment: dict[str, str], tmp_path: Path
):
    # An index that takes the question and never answers.
    with socket.create_server(("127.0.0.1", 0)) as index:
        environment |= {
            "PACELINE_CACHE": str(tmp_path / "cache"),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_NO_INDEX": "0",
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        with started(environment, "pull", DEFAULT_MODEL) as child:
            index.settimeout(PATIENCE)
            question, _ = index.accept()
            (work,) = models_dir(tmp_path / "cache").iterdir()
            assert work.name.startswith(".partial-")
            if whole_group:
                os.killpg(child.pid, signal.SIGINT)
            else:
                child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=PATIENCE)
            assert child.returncode == 130
            stopped_line(said)
            question.settimeout(PATIENCE)
            while question.recv(65536):
                pass  # what it had sent; then the end, as pip is gone
            question.close()
    assert not [*models_dir(tmp_path / "cache").iterdir()]


def test_ctrl_c_while_a_model_is_converted_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, endless_gguf: Path
):
    environment["PACELINE_CACHE"] = str(tmp_path / "cache")
    with started(environment, "pull", endless_gguf) as child:
        wait_for(child.stderr, b"building the graph")
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    stopped_line(said)
    assert not [*models_dir(tmp_path / "cache").iterdir()]


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(
    environment: dict[str, str], endless_gguf: Path
):
    with started(environment, "generate", "x", "--model", endless_gguf, "--ignore-eos") as child:
        assert child.stdout.read(10)
        child.stdout.close()
        said = child.stderr.read()
        assert child.wait(timeout=PATIENCE) == 128 + signal.SIGPIPE
    assert b"Traceback" not in said
    assert b"Exception ignored" not in said
    assert b"BrokenPipe" not in said


def test_output_into_head_works_as_people_expect(environment: dict[str, str], tiny_gguf: Path):
    line = f"{sys.executable} -m paceline models --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(
        ["bash", "-c", line], capture_output=True, env=environment, check=False, timeout=PATIENCE
    )
    assert found.stdout == b"["
    assert found.stderr == b""
