"""Keeping answers from the command line, and `paceline forget`."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main


@pytest.fixture
def run(cache: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: object) -> tuple[int, str, str]:
        code = main([*map(str, words)])
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def test_what_generate_keeps_is_listed_and_forgotten(
    run: Any, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_KEEP", "1")
    generate = ("generate", "the rain", "--model", tiny_gguf, "--max-tokens", 20, "--ignore-eos")
    assert run(*generate, "--no-keep")[0] == 0
    assert json.loads(run("forget", "--dry-run", "--json")[1]) == {"kept": []}
    code, _, said = run(*generate)
    assert code == 0
    assert "`paceline forget` removes them" in said
    (kept,) = json.loads(run("forget", "--dry-run", "--json")[1])["kept"]
    assert kept["bytes"] > 0
    code, _, said = run("forget", "--model", "x")
    assert (code, said.count("\n")) == (2, 1)
    assert "no answers of x are kept" in said
    assert run("forget", "--model", kept["model"])[1].startswith("removed: answers of")
    assert run("forget")[1] == "no answers are kept\n"
