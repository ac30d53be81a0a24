"""Commands in the docs and in scripts for other machines exist with their options.

Python runs, with the default model, which is loaded once for all.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer._click import ClickException

import paceline
from paceline import Model
from support.docs import BLOCK, PAGES, ROOT, commands, words_of
from support.process import python
from support.words import parse

OTHERS = {"docker", "jq", "nginx", "pip", "pytest", "python", "python3", "sh"}
"""Programs of the docs that are not paceline."""
LINES = [(page, line, words_of(line)) for page, line in sorted({*commands()})]


DEPLOY = "".join(
    (ROOT / f"deploy/on_a_{name}.sh").read_text("utf-8").replace("\\\n", "")
    for name in ("mac", "gpu")
)


def is_ours(words: list[str]) -> bool:
    return words[0].removeprefix(".venv/bin/") == "paceline"


@pytest.mark.parametrize(("page", "line", "words"), LINES)
def test_commands_in_the_docs_exist(page: str, line: str, words: list[str]):
    if is_ours(words):
        parse(words[1:])
    else:
        assert words[0].removeprefix(".venv/bin/") in OTHERS, f"{page}: unknown program in {line}"


@pytest.mark.parametrize(
    "line", re.findall(r"^[^#\n\"]*(?:\"[^\"]*\" )?(?:-m )?\bpaceline (.+)$", DEPLOY, re.M)
)
def test_commands_in_scripts_exist(line: str):
    command = re.sub(r'"\$@"|\$\{suite.*?\}| >.*', "", line)
    parse(shlex.split(re.sub(r"\$\w+", "1", command)))


SCRIPTS = [words for *_, words in LINES if words[0] == "python" and words[1] != "-m"]


@pytest.mark.parametrize("words", SCRIPTS, ids=" ".join)
def test_scripts_in_the_docs_have_the_shown_options(words: list[str]):
    shown = python(words[1], "--help", cwd=ROOT).stdout
    assert [word for word in words if word.startswith("--") and word not in shown] == []


def tables() -> list[str]:
    """Commands of ours in the tables of the page for users of other programs."""
    rows = (ROOT / "docs/coming-from.md").read_text("utf-8").splitlines()
    cells = [row.split("|")[2] for row in rows if row.startswith("| ")]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


PLACES = (["generate", "hi"], ["serve"], ["serve", "--all"])


@pytest.mark.parametrize("text", sorted(set(tables())))
def test_our_column_in_comparison_tables_exists(text: str):
    words = shlex.split(text)
    if words[0] == "paceline":
        parse(words[1:])
    elif text.startswith("--"):
        assert [place for place in PLACES if takes(place, words)], f"no command takes {text}"


def takes(command: list[str], words: list[str]) -> bool:
    """Return whether the command accepts these words, or the option with a value of its kind."""
    for more in ([], ["4"]):
        try:
            parse([*command, *words, *more])
        except (ClickException, SystemExit):
            continue
        return True
    return False


NEEDS = {"mac.md", "server.md"}
"""Pages whose Python needs a converted classifier, or a server."""
PYTHON = {
    page.name: "\n".join(code)
    for page in PAGES
    if page.name not in NEEDS
    if (code := [text for kind, text in BLOCK.findall(page.read_text("utf-8")) if kind == "python"])
}


@pytest.mark.real_model
@pytest.mark.parametrize("name", PYTHON)
def test_python_in_the_docs_runs(
    name: str,
    real_model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paceline, "load", lambda _: real_model)
    exec(compile(PYTHON[name], name, "exec"), {})
    assert capsys.readouterr().out.strip(), f"{name} printed nothing"


def test_recordings_match_the_commands_of_their_script():
    text = (ROOT / "docs/record.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/recordings.md").read_text(encoding="utf-8")
    shown = [code.strip() for language, code in BLOCK.findall(page) if language == "sh"]
    assert shown
    assert [command for command in shown if command not in text] == []
    assert page.count("<pre>") >= len(shown)


def test_the_row_rules_of_a_model_are_shown(tiny_gguf: Path, cache: Path):
    code = re.findall(r"python\" -c '(.*?)' ", (ROOT / "deploy/steps.sh").read_text("utf-8"), re.S)
    shown = python("-c", *code, tiny_gguf, "llamacpp").stdout
    assert "compared up to inf tokens\nexact: True" in shown


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_failed_step_is_recorded_and_the_next_one_runs(tmp_path: Path):
    report = tmp_path / "report.txt"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    settings = {"PACELINE": str(tmp_path), "FOLDER": "x", "REPORT": str(report), "TOTAL": "0"}
    command = ["sh", "deploy/on_a_gpu.sh", "llamacpp", "mlx"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False)
    assert done.returncode == 1
    text = report.read_text("utf-8")
    assert text.count("no time was left") == text.count("exit status 124") == 9
    assert text.rstrip().endswith("mlx drafters")
