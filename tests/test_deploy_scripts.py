"""Scripts for machines that are not here: their commands exist, and steps that fail are noted."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.scripts import ROOT
from support.words import parse

NAMES = ("on_a_mac", "on_a_gpu")
TEXTS = {
    name: (ROOT / f"deploy/{name}.sh").read_text("utf-8").replace("\\\n", "") for name in NAMES
}
LINES = re.findall(
    r"^[^#\n\"]*(?:\"[^\"]*\" )?(?:-m )?\bpaceline (.+)$", "".join(TEXTS.values()), re.M
)


@pytest.mark.parametrize("line", LINES)
def test_a_step_is_a_command_that_exists(line: str):
    command = re.sub(r'"\$@"|\$\{suite.*?\}| >.*', "", line)
    parse(shlex.split(re.sub(r"\$\w+", "1", command)))


@pytest.mark.parametrize("name", NAMES)
def test_scripts_of_steps_are_there(name: str):
    scripts = re.findall(r"benchmarks/\w+\.py", TEXTS[name])
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_rules_of_a_model_are_shown(tiny_gguf: Path, cache: Path):
    code = re.findall(r"python\" -c '(.*?)' ", (ROOT / "deploy/steps.sh").read_text("utf-8"), re.S)
    command = [sys.executable, "-c", *code, str(tiny_gguf), "llamacpp"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "compared up to inf tokens\nexact: True" in shown


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_step_that_fails_is_noted_and_the_next_one_runs(tmp_path: Path):
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
