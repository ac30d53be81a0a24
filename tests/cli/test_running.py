"""`generate` asks a server that runs, where the answer is the one that it would give itself."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import running as asked
from paceline.cli.app import main
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.profile import MEASUREMENTS
from support.server import Running, running


@pytest.fixture(scope="module")
def served(tiny_cache: Path, tiny_model: Model, tiny_gguf: Path) -> Iterator[Running]:
    """A server with the engine that `generate` takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tiny_cache))
        # Without what other tests measured the choice is llamacpp, however busy the machine was.
        for costs in (tiny_cache / MEASUREMENTS).glob("*.costs"):
            costs.unlink()
        model = load(tiny_gguf, engine="llamacpp", contexts=2)
        model.measure_profile()
        with running(model) as server:
            yield server


@pytest.fixture
def server(served: Running, cache: Path) -> Iterator[Running]:
    with asked.registration(served.model) as register:
        register(f"serving tiny at {served.url}/v1")
        yield served


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of servers that were asked, and answered."""
    urls, stream = list[str](), asked.stream

    def counted(url: str, *rest: Any) -> Iterator[Any]:
        yield from stream(url, *rest)
        urls.append(url)

    monkeypatch.setattr(asked, "stream", counted)
    return urls


@pytest.fixture
def generate(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def generate(*words: object) -> str:
        command = ["generate", "the quick brown fox", "--model", tiny_gguf, *words]
        assert main([*map(str, command)]) == 0
        return capsys.readouterr().out

    return generate


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-n", 30, "-s", "Be"],
        ["-n", 30, "-t", 0.9, "--seed", 7, "--top-k", 40, "--presence-penalty", 0.5],
        ["-n", 300, "--ignore-eos", "--repetition-detection"],
        ["-n", 30, "--stop", "e"],
    ],
    ids=str,
)
def test_the_answer_of_a_running_server_is_the_one_without_it(
    words: list[object],
    server: Running,
    answers: list[str],
    generate: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    text = generate(*words)
    assert answers == [f"{server.url}/v1"]
    monkeypatch.setattr(asked, "running_server", lambda *_: None)
    assert generate(*words) == text


@pytest.mark.parametrize(
    "words", [["--json"], ["--stats"], ["--drafter", "none"], ["--threads", 1], ["--raw"]], ids=str
)
def test_other_options_are_answered_here(
    words: list[object], server: Running, answers: list[str], generate: Any
):
    generate("-n", 4, *words)
    assert answers == []


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": "other"},
        {"engine": "other"},
        {"version": "0"},
        {"url": "http://127.0.0.1:1"},
    ],
    ids=str,
)
def test_a_server_of_another_model_or_version_is_not_asked(
    changed: dict[str, str], server: Running, answers: list[str], generate: Any, cache: Path
):
    path = cache / "serving" / f"{os.getpid()}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert generate("-n", 4)
    assert answers == []


def test_an_answer_with_a_drawn_seed_may_come_from_another_engine(
    server: Running, answers: list[str], generate: Any, cache: Path
):
    path = cache / "serving" / f"{os.getpid()}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "engine": "other"}))
    for words in (["-t", 1, "--seed", 1], ["-t", 0]):
        generate("-n", 4, *words)
    assert answers == []
    generate("-n", 4, "-t", 1)
    assert len(answers) == 1


def test_a_server_that_has_ended_is_forgotten(cache: Path, generate: Any):
    path = cache / "serving" / "1.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    assert generate("-n", 4)
    assert not path.exists()
