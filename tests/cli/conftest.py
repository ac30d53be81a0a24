import json
import os
import subprocess
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from support.process import COMMAND, Run
from support.tiny import SIZES, write_tiny
from support.waiting import PATIENCE

LONG = {**SIZES, "context": 200_000}  # answers that last until they are stopped


@pytest.fixture
def environment(cache: Path, tiny_model: Any, tmp_path: Path) -> dict[str, str]:
    """Environment with the tests' cache and without a hub or a package index."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PIP_NO_INDEX": "1"}
    return {**os.environ, **offline, "PIP_FIND_LINKS": ""}


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
    """Run a command that must fail with exit code 2, and return its one-line error."""

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
def mistake(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command that must fail in this process, which is much faster than `refused`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def mistake(*arguments: object, said: str = "Hello") -> str:
        monkeypatch.setattr("sys.stdin", StringIO(said))
        assert main([*map(str, arguments)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("paceline")
        assert sum(line.startswith("paceline") for line in lines) == 1
        return lines[-1]

    return mistake


@pytest.fixture
def answer(run: Run, tiny_gguf: Path) -> Run:
    def answer(*arguments: object, **options: Any) -> Any:
        return run("generate", "--model", tiny_gguf, *arguments, **options)

    return answer


@pytest.fixture
def value(cache: Path, tiny_gguf: Path, monkeypatch: Any, capsys: Any) -> Callable[..., Any]:
    """Runs `generate --json` in this process, which is much faster than `answer`."""

    def value(*arguments: object) -> Any:
        monkeypatch.setattr("sys.stdin", StringIO())
        words = ["generate", "--model", str(tiny_gguf), "--json", *map(str, arguments)]
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)

    return value


@pytest.fixture(scope="session")
def endless_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("endless") / "endless.gguf", sizes=LONG)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    message = {"role": "user", "content": "this is one and the user"}
    path.write_text(json.dumps({"id": "one", "kind": "chat", "messages": [message]}))
    return path
