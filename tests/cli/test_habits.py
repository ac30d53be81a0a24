"""Options of other runtimes work, or print their equivalent from docs/coming-from.md."""

import re
from typing import Any

import pytest

from paceline.cli.app import main, translated
from paceline.cli.habits import followed, habits
from support.scripts import ROOT
from support.words import commands, parse

PAGE = ROOT / "docs/coming-from.md"
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*(?:=(?:true|false))?")
NOT_TYPED = ("OLLAMA_", "num_ctx", "SYSTEM", "load", "/set", "mlx_lm.manage")
"""Beginnings of rows about variables, files, Python, chats, and another program's options."""


def rows() -> list[Any]:
    """Both sides of the rows about the three runtimes, as the code in them."""
    text = PAGE.read_text(encoding="utf-8").partition("## mlx-dspark")[0]
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    codes = [[re.findall(r"`([^`]+)`", cell) for cell in pair] for pair in cells]
    return [
        pytest.param(theirs, " ".join(ours), id=" ".join(theirs))
        for theirs, ours in codes
        if not theirs[0].startswith(NOT_TYPED)
    ]


@pytest.mark.parametrize(("theirs", "ours"), rows())
def test_options_of_other_tools_work_or_print_our_equivalent(theirs: list[str], ours: str):
    known = {*OPTION.findall(ours)}
    known |= {"-m"} if "--model" in known else set()
    for line in theirs:
        words = line.split()
        if words[0] == "ollama" and "paceline" in ours:
            assert f"paceline {translated(words[1:])[0]}" in ours
        for option in OPTION.findall(line):
            answers: list[str] = []
            found = followed(option, known, answers.append)
            answer = " ".join(answers) or habits("numbers").get(option, "")
            named = {*OPTION.findall(answer)} & known or "paceline generate" in answer
            assert found in known or named, (option, found, answer)


def test_table_rows_are_found_and_refer_to_existing_commands():
    assert len(rows()) > 25
    options = {name for _, command in commands() for each in command.params for name in each.opts}
    options |= {"--no-think"}
    assert {*habits("numbers")} <= options
    assert {*habits("options").values(), *habits("renamed").values()} <= options
    for answer in habits("answers").values():
        assert {*OPTION.findall(answer)} <= options


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("generate x --temp 0.7 --n-predict 9", "generate x -t 0.7 -n 9"),
        (
            "generate x --verbose --repeat-penalty=1.1",
            "generate x --stats --repetition-penalty 1.1",
        ),
        ("chat -hf owner/name -sys short", "chat owner/name --system short"),
        ("chat tiny --think=false", "chat tiny --no-think"),
        ("generate x --format json", "generate x --schema json"),
        ("generate x -jf a.json --grammar-file b", "generate x --schema a.json --grammar b"),
        ("serve --cors http://a.example -np 4", "serve --origin http://a.example --parallel 4"),
        ("generate x -r User: -n200", "generate x --stop User: -n 200"),
        ("generate -n-1 x -qmtiny", "generate x -q -m tiny -n -1"),
    ],
)
def test_an_option_with_the_same_meaning_is_accepted(words: str, meant: str):
    assert parse(words.split()) == parse(meant.split())


def test_a_renamed_option_works_and_its_new_name_is_printed(capsys: pytest.CaptureFixture[str]):
    words = "serve --all --at-once=3 --loaded 2 --idle 9 --kv q8_0 --rows 1 --anyone --grace 0"
    meant = (
        "serve --all --max-concurrent 3 --max-loaded-models 2 --keep-alive 9 "
        "--kv-cache-type q8_0 --min-rows 1 --no-auth --shutdown-timeout 0"
    )
    assert parse(words.split()) == parse(meant.split())
    assert "paceline: --at-once is now --max-concurrent\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("generate x -ngl 99", "no option is called -ngl; --device gpu"),
        ("serve -c 8192", "no option is called -c; --cache-tokens"),
        ("chat --ctx-size=8192", "no option is called --ctx-size; --cache-tokens"),
        ("generate -p Hello", "the prompt is an argument, as in paceline generate"),
        ("chat tiny -fa on", "it is not needed, so remove it"),
        ("generate x -md small.gguf", "--drafter model:NAME"),
        ("serve --temp 1", "--temperature of other commands does the same"),
        ("serve --cors", "--origin: expected a value"),
        ("generate x -t 8", "-t: it is the temperature, usually 0 to 2; give --threads"),
        ("serve -t 8", "no option is called -t; --threads N"),
        (f"generate x -t {'9' * 5000}", "-t: it is the temperature, usually 0 to 2"),
        ("generate x -t ²", "--temperature: '²' is not a number"),
        ("chat -s 42", "-s: it is the system message; give --seed"),
        ("generate x -st", "no option is called -st; it is not needed"),
        ("generate x -sm none", "no option is called -sm; one model runs on one GPU"),
        ("serve -cb", "no option is called -cb; it is not needed"),
        ("generate x --lora a.gguf", "LoRA adapters are not supported"),
        ("generate x -mm a.gguf", "images and audio are not supported"),
        ("generate x --mirostat 2", "this sampling method is not supported"),
        ("generate x -o temperature 0", "each setting has an option, such as --temperature"),
        ("-m tiny Hello", "options follow a command, as in paceline generate -m NAME"),
    ],
)
def test_an_option_with_another_meaning_is_explained(
    words: str, answer: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert answer in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "usage"),
    [("help", "[OPTIONS]"), ("help run", "chat"), ("help bench run", "bench run")],
)
def test_help_accepts_a_command(words: str, usage: str, capsys: pytest.CaptureFixture[str]):
    assert main(words.split()) == 0
    assert f"Usage: paceline {usage} " in capsys.readouterr().out
