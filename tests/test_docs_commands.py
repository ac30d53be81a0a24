"""Every command in the docs exists, with the options that are shown; other programs are listed.

`test_docs_commands_run.py` runs those that are cheap.

Python runs with the default model, but where NEEDS has a reason.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer._click import ClickException

import paceline
from paceline import Model
from support.docs import BLOCK, PAGES, ROOT, commands, words_of
from support.words import parse

# Programs that are not paceline, and why this test does not run them.
OTHERS = {
    "docker": "needs a daemon",
    "jq": "another program",
    "nginx": "another program; tests/server/test_behind_nginx.py runs it with this file",
    "pip": "installs packages",
    "python": "a script of ours: its options are read",
    "python3": "CI runs both lines of the README",
}


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_a_line_of_the_docs_is_a_command_that_exists(page: str, line: str):
    words = words_of(line)
    if words[0].removeprefix(".venv/bin/") == "paceline":
        parse(words[1:])
    else:
        assert words[0].removeprefix(".venv/bin/") in {*OTHERS, "pytest"}, (
            f"{page}: unknown program in {line}"
        )


def test_every_reason_is_needed():
    used = {words_of(line)[0] for _, line in commands()}
    lines = " ".join(line for _, line in commands())
    assert {program for program in OTHERS if program not in used and program not in lines} == set()


SCRIPTS = [words_of(line) for _, line in commands() if words_of(line)[0] == "python"]


@pytest.mark.parametrize("words", [script for script in SCRIPTS if script[1] != "-m"], ids=" ".join)
def test_a_script_of_the_docs_has_the_options_that_are_shown(words: list[str]):
    done = subprocess.run(
        [sys.executable, words[1], "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [word for word in words if word.startswith("--") and word not in done.stdout] == []


def tables() -> list[str]:
    """Commands of ours in the tables of the page for users of other programs."""
    rows = (ROOT / "docs/coming-from.md").read_text("utf-8").splitlines()
    cells = [row.split("|")[2] for row in rows if row.startswith("| ")]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("text", sorted(set(tables())))
def test_what_a_table_says_is_ours_exists(text: str):
    words = shlex.split(text)
    if words[0] == "paceline":
        parse(words[1:])
    elif text.startswith("--"):
        assert [place for place in PLACES if takes(place, words)], f"no command takes {text}"


PLACES = (["generate", "hi"], ["serve"], ["serve", "--all"])


def takes(command: list[str], words: list[str]) -> bool:
    """Whether the command accepts these words, or the option with a value of its kind."""
    for more in ([], ["4"]):
        try:
            parse([*command, *words, *more])
        except (ClickException, SystemExit):
            continue
        return True
    return False


# Pages whose Python this test does not run, and why.
NEEDS = {
    "platforms.md": "a converted classifier",
    "server.md": "a server; tests/server runs the same client",
}


PYTHON = [
    (page.name, "\n".join(code))
    for page in PAGES
    if (code := [text for kind, text in BLOCK.findall(page.read_text("utf-8")) if kind == "python"])
]


def test_every_page_whose_python_is_not_run_has_python():
    assert NEEDS.keys() <= {name for name, _ in PYTHON}


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "code"), [item for item in PYTHON if item[0] not in NEEDS])
def test_python_in_the_docs_runs(
    name: str,
    code: str,
    real_model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paceline, "load", lambda _: real_model)
    exec(compile(code, name, "exec"), {})
    assert capsys.readouterr().out.strip(), f"{name} printed nothing"


def test_the_recordings_are_of_the_commands_that_the_script_records():
    text = (ROOT / "docs/record.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/recordings.md").read_text(encoding="utf-8")
    shown = [code.strip() for language, code in BLOCK.findall(page) if language == "sh"]
    assert shown
    assert [command for command in shown if command not in text] == []
    assert page.count("<pre>") >= len(shown)
