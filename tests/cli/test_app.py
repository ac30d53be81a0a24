"""The command line as a whole: help, version, completion, exit codes, one-line errors."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.answers import trial_notice
from paceline.cli.app import main, translated
from paceline.cli.console import print_table
from paceline.cli.options import default_model
from paceline.models import DEFAULT_MODEL
from paceline.models.names import known_models
from support.process import Run, python
from support.words import commands, parse

COMMANDS = sorted({words[0] for words, _ in commands()})


def test_help_and_version_exit_with_0(run: Run):
    assert run("--version").stdout.startswith("paceline ")
    help_ = run("--help").stdout
    assert all(command in help_ for command in COMMANDS)
    assert run().stdout == run("help").stdout == help_
    assert "simulate" in run("bench").stdout


def own_commands() -> list[Any]:
    return [pytest.param(command, id=" ".join(name)) for name, command in commands()]


@pytest.mark.parametrize("command", own_commands())
def test_every_help_has_two_valid_example_commands(command: Any):
    examples = getattr(command, "examples", ())
    assert len(examples) > 1 or command.callback.__module__.startswith("paceline_coreml.")
    for example in examples:
        line = shlex.split(example, comments=True)
        parse(line[line.index("paceline") + 1 :])


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_help_fits_one_screen_and_help_all_lists_every_option(
    command: str, capsys: pytest.CaptureFixture[str]
):
    assert main([command, "-h"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 30
    assert "-m, --model" in short
    assert main([command, "--help-all"]) == 0
    whole = capsys.readouterr().out
    (shown,) = (made for name, made in commands() if name == (command,))
    for option in shown.params:
        if option.param_type_name == "option" and not option.hidden:
            assert option.opts[-1] in whole


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("list --json", "models --json"),
        ("run tiny", "chat tiny"),
        ("run tiny -t 0", "chat tiny -t 0"),
        ("run tiny Hello --json", "generate Hello --json --model tiny"),
        ("rm tiny", "rm tiny"),
        ("delete tiny", "rm tiny"),
        ("version", "--version"),
        ("", ""),
    ],
)
def test_option_names_of_other_programs_are_recognized(words: str, meant: str):
    assert translated(words.split()) == meant.split()


def test_the_default_model_comes_from_the_environment_or_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("PACELINE_MODEL", raising=False)
    path = tmp_path / "config.toml"
    monkeypatch.setattr("paceline.cli.options.settings_file", lambda: path)
    assert default_model() == DEFAULT_MODEL
    path.write_text('model = "mine"')
    assert default_model() == "mine"
    monkeypatch.setenv("PACELINE_MODEL", "other")
    assert default_model() == "other"
    monkeypatch.delenv("PACELINE_MODEL")
    for wrong in ("model =", "model = 5", 'modle = "mine"', "\0"):
        path.write_text(wrong)
        assert main(["generate", "x"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_demo_model_is_announced_once_with_a_better_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    better = {}
    for gigabytes, cpus in ((4, 8), (24, 2), (24, 8), (64, 1), (64, 64)):
        monkeypatch.setattr("paceline.system.machine.memory_bytes", lambda gb=gigabytes: gb * 10**9)
        monkeypatch.setattr("paceline.system.machine.cpu_cores", lambda count=cpus: count)
        notice = trial_notice(DEFAULT_MODEL)
        assert notice is not None
        (name,) = re.findall(r"paceline pull (\S+)`", notice)
        (speed,) = re.findall(rf"at (\d+) tokens/s on {cpus} CPUs", notice)
        assert int(speed) >= 5
        assert known_models()[name].bytes <= gigabytes * 10**9 / 3
        better[gigabytes, cpus] = name
    assert better[24, 2] != "qwen3-8b"
    assert better[24, 8] == better[64, 64] == "qwen3-8b"
    assert trial_notice(name) is None
    (tmp_path / "models" / DEFAULT_MODEL).mkdir(parents=True)
    assert trial_notice(DEFAULT_MODEL) is None


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("generate", "--help")])
def test_help_imports_nothing_heavy(words: tuple[str, ...]):
    heavy = {"numpy", "tokenizers", "paceline.runtime", "paceline.engines"}
    script = f"""
import sys
from paceline.cli.app import main
assert main({[*words]!r}) == 0
assert not {heavy!r} & sys.modules.keys(), {heavy!r} & sys.modules.keys()
"""
    python("-c", script)


def test_a_shell_completes_commands_and_options():
    def completed(words: str) -> list[str]:
        request = {
            "_PACELINE_COMPLETE": "complete_bash",
            "COMP_WORDS": f"paceline {words}",
            "COMP_CWORD": str(len(words.split(" "))),
        }
        return python("-m", "paceline", env=request).stdout.split()

    assert completed("ben") == ["bench"]
    assert completed("bench sim") == ["simulate"]
    assert {"--drafter", "--drop-oldest"} <= {*completed("chat --dr")}
    assert completed("generate --compute-units cpu-o") == ["cpu-only"]


def test_an_option_accepts_an_equals_sign_and_may_be_repeated():
    assert parse(["generate", "x", "--top-k=3"])["top_k"] == 3
    found = parse(["bench", "run", "--drafter", "a", "--drafter=b", "--json"])
    assert (found["drafter"], found["json"]) == (["a", "b"], True)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("generate x -n 200 -n 5", {"max_tokens": 5}),
        ("chat -m a --model=b -t 1 -t 0", {"model": "b", "temperature": 0.0}),
        ("generate x --no-think --think", {"think": True}),
        ("generate x --think --json --no-think --json", {"think": False, "json": True}),
    ],
)
def test_the_last_value_of_a_repeated_option_wins(words: str, values: dict[str, Any]):
    found = parse(words.split())
    assert {name: found[name] for name in values} == values


@pytest.mark.parametrize(
    "words",
    [
        *("serve tiny --port 1", "chat -t 0 tiny", "plan tiny", "verify --quick tiny"),
        *("bench run tiny", "bench simulate tiny --texts a", "forget tiny --dry-run"),
        *("pull tiny", "rm tiny", "learn tiny"),
    ],
)
def test_every_command_accepts_its_model_as_a_positional_argument(
    words: str, capsys: pytest.CaptureFixture[str]
):
    assert parse(words.split())["model"] == "tiny"
    assert main([*words.partition(" tiny")[0].split(), "--help"]) == 0
    assert "model" in capsys.readouterr().out.partition("\n")[0]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("models --jsn --json", "NoSuchOption"),
        ("dance --json", "UsageError"),
        ("generate x --json -n 0", "BadParameter"),
        ("generate x -m nothing --json", "ModelNotFound"),
        ("generate x --json --drafter magic", "InvalidRequest"),
        ("verify --json --suite /no/file", "InvalidRequest"),
    ],
)
def test_an_error_is_one_line_of_json_when_json_output_is_requested(
    words: str, kind: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words.split()) == 2
    out, said = capsys.readouterr()
    assert (out, said.count("\n")) == ("", 1)
    error = json.loads(said)["error"]
    assert (error["type"], error["exit_code"]) == (kind, 2)
    assert main(words.replace("--json", "").split()) == 2
    assert capsys.readouterr().err.partition(": ")[2].split()[0] in error["message"]


def test_a_piped_table_has_one_line_per_row(capsys: pytest.CaptureFixture[str]):
    cell = "one cell that is longer than a terminal is wide " * 5
    print_table(["a", "b"], [[cell, 1], ["x", cell]])
    head, *rows = capsys.readouterr().out.splitlines()
    assert (head.split(), len(rows)) == (["a", "b"], 2)
    assert rows[0].split() == [*cell.split(), "1"]


def test_values_may_start_with_a_dash_and_prompts_after_two_dashes():
    found = parse(["generate", "-", "--max-tokens", "-1", "--system", "-s -t", "--stop", "- "])
    assert [found[name] for name in ("max_tokens", "system", "stop")] == [-1, "-s -t", ["- "]]
    assert parse(["generate", "--stats", "--", "--raw"])["prompt"] == "--raw"


@pytest.mark.parametrize(
    "words", [("generate", "--file"), ("generate", "--file", "--json"), ("serve", "--port")]
)
def test_an_option_with_a_missing_value_is_named(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    assert main([*words]) == 2
    assert f"{words[1]}: expected a value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("dance",), "dance"),
        (("generat", "x"), "did you mean generate?"),
        (("bench", "rnu"), "did you mean run?"),
        (("create", "mine", "-f", "Modelfile"), "Modelfiles are not read, and --system"),
        (("generate", "x", "--max-tokns", "3"), "did you mean --max-tokens?"),
        (("write a haiku",), "a prompt follows its command, as in paceline generate"),
        (("generate", "a", "b"), "extra argument(s) (b); a prompt is one argument, in quotes"),
        (("chat", "tiny", "b"), "extra argument(s) (b)"),
        (("chat", "-m", ""), "the model's name is empty"),
        (("rm", ""), "the model's name is empty"),
        (("pull", "Qwen3-"), "prefix: qwen3-0.6b (639.4 MB), qwen3-1.7b (1.3 GB), qwen3-4b"),
        (("pull", "qwen3:0.6b"), "did you mean qwen3-0.6b?"),
        (("generate", "x", "-m", "."), "is not a model: expected a GGUF file, or a folder with"),
        (("generate", "-", "--no-stdin"), "not with --no-stdin"),
        (("generate", "-", "--file", "-"), "- reads standard input: give it once"),
        (("generate", "--no-stdin"), "the prompt is missing"),
        (("generate", "--nonsense"), "--nonsense"),
        (("generate", "x", "--logit-bias", "5"), "'5' is not TOKEN=BIAS, as in 42=-5"),
        (("bench", "run", "--rounds", "0"), "'0' is not a whole number from 1 to 2**31 - 1"),
        (("convert",), "source"),
        (("convert", "x", "--to", "paper"), "--to: 'paper' is not one of 'coreml'"),
        (("generate", "-5"), "a prompt that begins with a dash follows --"),
        (("coreml", "lint"), "artifact"),
        (("generate", "x", "--engine", "abacus"), "unknown engine 'abacus'"),
        (("generate", "x", "--engine", "coreml"), f"{DEFAULT_MODEL} has no Core ML version"),
        (("pull", "gpt-9"), "unknown model 'gpt-9'"),
        (("generate", "x", "--model", "owner/name"), "Hub cannot be reached"),
        (("pull", "a--b/c"), "not a Hub name"),
        (("generate", "x", "--model", "x" * 300), "File name too long"),
        (("generate", "x", "--schema", "/no/y"), "cannot read /no/y"),
        (("generate", "x", "--schema", "{"), "the schema is not JSON: Expecting"),
        (("generate", "x", "--schema", "/dev/null"), "/dev/null is not JSON"),
        (("generate", "x", "--regex", "a", "--grammar", "start: x"), "regex and grammar cannot"),
        (("generate", "--file", "/no/such/file"), "cannot read /no/such/file"),
        (
            ("serve", "--max-loaded-models", "2"),
            "--max-loaded-models, --memory and --keep-alive need --all",
        ),
        (("generate", "x", "--drafter", "table:/a+b"), "unknown drafter 'b'"),
        (("bench", "run", "--suite", "/no/suite"), "cannot read /no/suite"),
    ],
)
def test_a_usage_error_is_one_line_that_names_the_cause(
    arguments: tuple[str, ...], reason: str, mistake: Any
):
    assert reason in mistake(*arguments)
