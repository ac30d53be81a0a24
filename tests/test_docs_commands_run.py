"""Commands of the docs run as they are shown, with the default model; the others have a reason.

The model is loaded once for all, answers end after a few tokens, and files that a command reads are
here before it.
"""

import io
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from paceline import Model
from paceline.cli.app import main
from support.docs import ROOT, commands, words_of

# First words of commands that do not run here, and why. The longest that fits holds.
NOT_RUN = {
    "bench agent": "minutes; tests/lab/test_agent.py",
    "bench peers": "other runtimes; tests/lab/test_peers.py",
    "bench report": "draws charts for seconds; tests/lab/test_report.py",
    "bench run": "minutes; tests/lab/bench/test_run.py",
    "bench simulate": "minutes; tests/lab/test_simulate_command.py",
    "bench sweep": "minutes; tests/lab/test_sweep.py",
    "classify": "a converted classifier; tests/coreml/test_classify.py",
    "convert": "fetches a checkpoint; tests/models",
    "coreml": "a converted model; tests/coreml",
    "generate --model": "a model that is fetched",
    "generate Count": "a converted model; tests/coreml",
    "generate Name": "a model for MLX",
    "launch": "another program; tests/cli/test_launch.py",
    "learn": "hours; tests/lab/learn",
    "plan": "measures the machine; tests/test_plan.py",
    "pull Qwen/Qwen3-8B-GGUF:Q4_K_M": "a model that is fetched; tests/models/test_published.py",
    "pull qwen3-8b": "a model that is fetched; tests/models/test_published.py",
    "serve": "does not end; tests/server",
    "verify": "minutes, or a server; tests/verify/test_verify.py and test_verify_server.py",
}


def ours() -> list[str]:
    """Command lines of paceline, each once."""
    return sorted({line for _, line in commands() if is_ours(words_of(line))})


def is_ours(words: list[str]) -> bool:
    return words[0].removeprefix(".venv/bin/") == "paceline"


def reason(line: str) -> str | None:
    """The key of `NOT_RUN` for a command that does not run here."""
    text = " ".join(words_of(line)[1:])
    fitting = [name for name in NOT_RUN if f"{text} ".startswith(f"{name} ")]
    return max(fitting, key=len, default=None)


RUN = [line for line in ours() if reason(line) is None]


def test_every_reason_not_to_run_a_command_is_needed():
    assert {*map(reason, ours())} - {None} == NOT_RUN.keys()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_model: Model) -> Path:
    """A folder with the files that the commands read; they load the model of this session."""
    results = ROOT / "benchmarks" / "results"
    for name in ("before.json", "after.json"):
        shutil.copy(results / "suite.json", tmp_path / name)
    for name in ("prompt.txt", "orders.txt"):
        (tmp_path / name).write_text("Name a river.\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.runtime.load.load", lambda *_, **__: real_model)
    return tmp_path


@pytest.mark.real_model
@pytest.mark.parametrize("line", RUN)
def test_a_command_of_the_docs_runs(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = words_of(line)[1:]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name a river.\n"))
    if words[0] in ("generate", "chat"):
        words += ["--max-tokens", "4"]
    assert main(words) == 0, capsys.readouterr().err
    done = capsys.readouterr()
    assert done.out.strip() or done.err.strip(), f"{line} printed nothing"
    for name in after(words, "--output"):
        assert (folder / name).exists(), f"{line} wrote no {name}"


def after(words: list[str], option: str) -> list[str]:
    """The values of an option."""
    return [value for name, value in pairwise(words) if name == option]
