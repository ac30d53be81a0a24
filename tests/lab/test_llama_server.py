"""A llama-server of the user's as a peer: found, started, asked and ended, with a fake of it."""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import ModelFiles
from paceline.verify.suite import SuitePrompt
from paceline_lab.bench.record import read_record
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.peers import llama_server
from paceline_lab.peers.llama_server import LOOKUPS, LlamaServer, server_binary
from support import fake_llama_server
from support.process import started, stopped_line
from support.scripts import script
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake is a shell script")

QUESTION = PromptTurn("one", SuitePrompt("one", "chat", []), 1, [], [7, 8, 9])


def program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    path = tmp_path / "log.jsonl"
    monkeypatch.setenv("FAKE_LOG", str(path))
    return lambda: [json.loads(line) for line in path.open()] if path.exists() else []


@pytest.fixture
def fake(tmp_path: Path, log: object) -> Path:
    """Without `exec`: the server is a child of the program that was named."""
    return program(
        tmp_path / "llama-server", f'{sys.executable} -P {fake_llama_server.__file__} "$@"'
    )


@pytest.fixture
def opened(fake: Path, tiny_files: ModelFiles) -> Any:
    def server(on_message: Callable[[str], None] = print) -> LlamaServer:
        return LlamaServer(
            tiny_files, server_binary(str(fake)), 100, threads=3, on_message=on_message
        )

    return server


def all_ended(log: Callable[[], list[dict[str, Any]]]) -> bool:
    """True if no server of the log runs any more: each has a lock of it.

    Its port does not tell: another test may have taken it.
    """
    assert any("argv" in entry for entry in log()), "no server was started"
    with Path(os.environ["FAKE_LOG"]).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_each_response_comes_from_a_new_server_with_its_rows_options(
    opened: Any, log: Any, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "ngram-mod")
    peer = opened()
    assert peer.modes == ("plain", *LOOKUPS)
    plain = peer.answer(QUESTION, 5, "plain")
    lookup = peer.answer(QUESTION, 5, "ngram-cache")
    assert plain.same(lookup)
    assert plain.tokens == [14, 15, 16, 17, 18]
    assert (plain.first_token_seconds, plain.rate, plain.draft) == (0.25, 2.0, (0, 0))
    assert (lookup.rate, lookup.draft) == (4.0, (6, 4))
    assert plain.seconds is not None
    assert plain.whole_rate == 5 / plain.seconds, "the client's clock, not the server's"
    starts = [entry for entry in log() if "argv" in entry]
    requests = [entry["body"] for entry in log() if "body" in entry]
    assert len(starts) == 1 + 2, "once to try it"
    assert starts[1]["argv"][:6] == [
        *("--model", str(tiny_gguf.resolve()), "--ctx-size", "165", "--threads", "3")
    ]
    assert "--spec-type" not in starts[1]["argv"]
    assert "ngram-cache" in starts[2]["argv"]
    assert starts[1]["settings"] == []
    assert requests[0]["prompt"] == [7, 8, 9]
    assert (requests[0]["temperature"], requests[0]["cache_prompt"]) == (0, False)
    assert peer.settings["version"] == "9876 (abcdef)"
    until(lambda: all_ended(log))


@pytest.mark.parametrize(
    ("way", "modes"), [("unspeculative", ("plain",)), ("some", ("plain", "ngram-mod"))]
)
def test_lookup_modes_missing_in_a_version_are_skipped_and_named(
    way: str, modes: tuple[str, ...], opened: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_WAY", way)
    lines: list[str] = []

    assert opened(lines.append).modes == modes
    (line,) = (line for line in lines if "llama-server" in line)
    assert [name for name in LOOKUPS if name not in line] == [*modes[1:]]


@pytest.mark.parametrize("lines", [("echo version: 1",), ("exec sleep 600",)])
def test_a_program_other_than_llama_server_is_rejected(
    lines: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline_lab.peers.llama_server._SECONDS", 0.5)
    path = program(tmp_path / "other", *lines)
    with pytest.raises(InvalidRequest) as error:
        server_binary(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_invalid_server_program_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text, image = tmp_path / "text", tmp_path / "image"
    text.write_text("hello")
    image.write_bytes(b"\x7fELF")
    image.chmod(0o755)
    for path in (text, image, tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidRequest):
            server_binary(str(path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtra):
        server_binary(None)


@pytest.mark.parametrize(
    ("way", "says"), [("ends", "failed to load model"), ("loading", "not ready after 1 s")]
)
def test_a_server_that_never_becomes_ready_is_stopped_with_an_error(
    way: str, says: str, opened: Any, log: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_WAY", way)
    if way == "loading":
        monkeypatch.setattr(llama_server, "READY_SECONDS", 1.0)
    with pytest.raises(ModelError) as error:
        opened()
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    if way != "ends":
        until(lambda: all_ended(log))


@pytest.mark.parametrize("way", ["dies", "refuses", "silent", "old"])
def test_a_failed_response_is_a_one_line_error(
    way: str, opened: Any, log: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_WAY", way)
    peer = opened()
    with pytest.raises(ModelError) as error:
        peer.answer(QUESTION, 5, "plain")
    assert "\n" not in str(error.value)
    if way == "dies":
        assert "exit code 3" in str(error.value)
        assert "out of memory" in str(error.value)
    until(lambda: all_ended(log))


def suite_of_two_turns(path: Path) -> Path:
    entry = {"question_id": 1, "category": "writing", "turns": ["this is one", "and the user"]}
    path.write_text(json.dumps(entry), encoding="utf-8")
    return path


def arguments(fake: Path, gguf: Path, suite: Path) -> list[str]:
    options = {"--suite": suite, "--max-tokens": 8, "--rounds": 1, "--engine": "llamacpp"}
    words: list[Any] = ["bench", "peers", "--model", gguf, "--llama-server", fake]
    return [str(word) for word in (*words, *(part for item in options.items() for part in item))]


def test_the_command_compares_with_a_server_turn_by_turn(
    cache: Path,
    fake: Path,
    log: Any,
    tiny_gguf: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    output = tmp_path / "peers.json"
    words = arguments(fake, tiny_gguf, suite_of_two_turns(tmp_path / "suite.jsonl"))
    assert main([*words, "--output", str(output)]) == 0
    record = read_record(output)
    servers = [f"llama-server, {mode}" for mode in ("plain", *LOOKUPS)]
    assert record.contenders == ["plain", "auto", *servers]
    assert record.cases == ["1", "1, turn 2"]
    figures = record.summary["speeds"]
    assert figures["reference"] == "llama-server, plain"
    lookup = figures["contenders"]["llama-server, ngram-mod"]
    assert lookup["over_reference"] == {"mean": 2.0, "median": 2.0, "least": 2.0}
    assert (lookup["drafted"], lookup["accepted"], lookup["texts_changed"]) == (12, 8, 0)
    head, _, *lines = script("peers_table").table([record])
    assert {len(head)} == {len(line) for line in lines}
    assert [line[0] for line in lines] == record.contenders
    first, second = (row for row in record.rows if row.contender == "plain")
    assert second.facts["prompt_tokens"] > first.facts["prompt_tokens"] + first.facts["tokens"]
    prompts = {len(entry["body"]["prompt"]) for entry in log() if "body" in entry}
    assert prompts == {first.facts["prompt_tokens"], second.facts["prompt_tokens"]}
    assert "llama-server, ngram-cache" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_during_a_response_stops_the_command_and_the_server(
    cache: Path, fake: Path, log: Any, tiny_gguf: Path, tmp_path: Path
):
    words = arguments(fake, tiny_gguf, suite_of_two_turns(tmp_path / "suite.jsonl"))
    with started({**os.environ, "FAKE_WAY": "hangs"}, *words) as child:
        until(lambda: any("body" in entry for entry in log()))
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENCE)
        assert child.returncode == 130
    stopped_line(errors)
    until(lambda: all_ended(log))
