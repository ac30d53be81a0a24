"""Answer history on the command line, and `paceline forget`."""

import json
from io import StringIO
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


def answer(path: Path, *more: str) -> tuple[object, ...]:
    """A command that generates, without the name of it."""
    return ("--model", path, "--max-tokens", 20, "--ignore-eos", *more)


def kept(run: Any) -> Any:
    return json.loads(run("forget", "--dry-run", "--json")[1])["kept"]


def test_answer_history_is_off_by_default(
    run: Any, tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", StringIO("the rain\n"))
    for words in (("generate", "the rain"), ("chat",)):
        code, _, said = run(*words, *answer(tiny_gguf))
        assert code == 0
        assert "forget" not in said
    assert kept(run) == []
    assert not [*cache.glob("kept/*")]


def test_answer_history_is_announced_listed_and_deleted(run: Any, tiny_gguf: Path):
    code, _, said = run("generate", "the rain", *answer(tiny_gguf, "--keep"))
    assert code == 0
    (notice,) = [line for line in said.splitlines() if "forget" in line]
    assert "tokens of answers" in notice
    assert "`paceline forget` deletes them" in notice
    (found,) = kept(run)
    assert found["bytes"] > 0
    assert Path(found["folder"]).name not in said, "the notice has a path of hashes"
    code, _, said = run("generate", "the rain", *answer(tiny_gguf, "--keep"))
    assert "forget" not in said, "it is announced once"
    code, _, said = run("forget", "--model", "x")
    assert (code, said.count("\n")) == (2, 1)
    assert "no saved answers or drafters for 'x'" in said
    _, out, _ = run("forget", "--model", found["model"])
    assert out.startswith(f"removed: answers of {found['model']}, ")
    assert Path(found["folder"]).name not in out
    assert run("forget")[1] == "nothing is saved\n"


def test_answer_history_is_enabled_globally_and_disabled_per_command(
    run: Any, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_KEEP", "1")
    assert run("generate", "the rain", *answer(tiny_gguf, "--no-keep"))[0] == 0
    assert kept(run) == []
    assert run("generate", "the rain", *answer(tiny_gguf))[0] == 0
    assert len(kept(run)) == 1
    assert run("forget")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        *(["generate", "hi", "--model", "MODEL", option] for option in ("--drafter", "--probe")),
        ["serve", "--port", "0", "--model", "MODEL", "--drafter"],
        ["serve", "--port", "0", "--all", "--drafter"],
    ],
)
def test_the_kept_drafter_requires_answer_history(
    words: list[str], run: Any, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    for server in ("server.run.serve", "server.router.run.serve_all"):
        monkeypatch.setattr(f"paceline.{server}", lambda *_, **__: pytest.fail("it starts"))
    words = [str(tiny_gguf) if word == "MODEL" else word for word in words]
    code, out, said = run(*words, "suffix+kept")
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert "--keep" in said
