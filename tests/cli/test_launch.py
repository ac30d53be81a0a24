"""`paceline launch` with fake agents; benchmarks/clients runs the real ones."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from paceline.cli import launch
from paceline.cli.launch import Endpoint
from paceline.cli.servers import registration
from paceline.engines import open_engine
from paceline.engines.base import EngineSettings
from paceline.errors import InvalidRequest
from paceline.models import resolve
from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.process import Run, started, stopped_line, wait_for
from support.server import running
from support.waiting import PATIENCE, until

AGENTS = ("claude", "codex", "opencode")
FAKE = Path(__file__).parents[1] / "support" / "fake_agent.py"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The user's home folder, which stays empty."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def agents(environment: dict[str, str], tmp_path: Path, home: Path) -> dict[str, str]:
    """Environment of a user with all agents, and with a proxy and a cloud that never respond."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in AGENTS:
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {name} "$@"\n')
        (folder / name).chmod(0o755)
    proxy = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy"), "http://127.0.0.1:9")
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    cloud = {"CLAUDE_CODE_USE_BEDROCK": "1"}
    return {**environment, **proxy, **cloud, "PATH": path, "HOME": str(home)}


def is_open(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as client:
        return client.connect_ex((address.hostname, address.port)) == 0


@pytest.mark.parametrize("agent", AGENTS)
def test_a_second_session_restores_system_prompt_and_tools_from_disk(
    agent: str, run: Run, agents: dict[str, str], home: Path, endless_gguf: Path, tmp_path: Path
):
    agents["PACELINE_CACHE"] = str(tmp_path / "cache")
    model = tmp_path / "a 🦙.gguf"
    model.hardlink_to(endless_gguf)
    words = ("-p", "two words", "--", "-x", "--json")
    sessions = []
    for task in ("one", "another thing"):
        argv = ("launch", agent, "-m", model, "--", "ask", task, *words)
        done = run(*argv, env=agents)
        assert done.returncode == 7, done.stderr
        sessions.append(json.loads(done.stdout))
        assert "serving" not in done.stderr
        assert sessions[-1]["arguments"] == ["ask", task, *words]
        assert sessions[-1]["model"] == model.stem
        assert not is_open(sessions[-1]["url"])
    first, second = sessions
    assert first["key"] != second["key"]
    assert first["cached"] < 64
    assert second["cached"] > 500
    assert second["computed"] < 64, "the task, and nothing before it"
    assert not [*home.iterdir()]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 5), (signal.SIGTERM, 6), (signal.SIGKILL, -9)]
)
def test_signals_reach_the_agent_and_no_server_is_left(
    number: signal.Signals, code: int, agents: dict[str, str], endless_gguf: Path
):
    argv = ("launch", "codex", "-m", endless_gguf, "--quiet", "--", "wait")
    with started(agents, *argv, stdin=subprocess.PIPE) as launch:
        found = json.loads(wait_for(launch.stdout, b"{"))
        assert is_open(found["url"])
        if number == signal.SIGINT:  # as a terminal sends it: to both
            os.killpg(launch.pid, number)
        else:
            launch.send_signal(number)
        assert launch.wait(PATIENCE) == code
        until(lambda: not is_open(found["url"]))
        launch.stdin.close()  # the end of an agent that outlives its parent
        if number != signal.SIGKILL:
            assert launch.stderr.read() == b""


def test_ctrl_c_during_server_startup_stops_the_server(agents: dict[str, str], endless_gguf: Path):
    with started(agents, "launch", "codex", "-m", endless_gguf) as launch:
        wait_for(launch.stderr, b"starting a server")
        os.killpg(launch.pid, signal.SIGINT)
        out, errors = launch.communicate(timeout=PATIENCE)
    assert (launch.returncode, out) == (130, b"")
    stopped_line(errors)


def test_an_orphaned_server_exits_before_loading_its_model(run: Run, tiny_gguf: Path):
    done = run("serve", "-m", tiny_gguf, "--port", "0", "--until-input-ends", input="")
    assert -done.returncode == signal.SIGTERM
    assert "serving" not in done.stderr


@pytest.fixture
def served_gguf(endless_gguf: Path, cache: Path) -> Iterator[Model]:
    """The endless model with a KV cache of 16,384 tokens."""
    files = resolve(str(endless_gguf))
    settings = EngineSettings(cache_tokens=16_384, threads=1)
    yield Model(files, open_engine("llamacpp", files.path, files.context_length, settings))


def test_launch_reuses_a_running_server_if_its_key_is_known(
    served_gguf: Model, run: Run, agents: dict[str, str], endless_gguf: Path
):
    argv = ("launch", "opencode", "-m", endless_gguf)
    closed = Settings(api_keys=("secret",))
    with running(served_gguf, closed) as server, registration() as register:
        register(f"serving endless at {server.url}/v1 (a page)")
        agents["PACELINE_API_KEY"] = "secret"
        found = json.loads(run(*argv, "--", "ask", "one", env=agents).stdout)
        assert found["url"].startswith(server.url)
        refused = run("launch", "claude", "-m", endless_gguf, env=agents)
        assert refused.returncode == 2
        assert "claude sends about 23,000 tokens, but endless holds 16,384" in refused.stderr

        printed = run(*argv, "--print", "--", "ask", "it's", env=agents)
        shell = subprocess.run(
            ["sh", "-c", printed.stdout], env=agents, stdout=subprocess.PIPE, check=False
        )
        assert shell.returncode == 7
        found = json.loads(shell.stdout)
        assert (found["arguments"], found["key"]) == (["ask", "it's"], "secret")
        assert found["cached"] > found["computed"]

        agents["PACELINE_API_KEY"] = "another"
        printed = run(*argv, "--print", "--json", env=agents)
        value = json.loads(printed.stdout)
        assert value["serve"][:2] == ["paceline", "serve"]
        assert value["command"] == ["opencode"]
        assert "http://127.0.0.1:8000/v1" in value["environment"]["OPENCODE_CONFIG_CONTENT"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("codex", "-m", "TINY"), "codex sends about 11,000 tokens, but tiny holds"),
        (("claude", "-m", "TINY", "--print"), "claude sends about 23,000 tokens, but tiny holds"),
        (("cursor",), "'cursor' is not one of 'claude', 'codex', 'opencode'"),
        (("codex", "-m", "no-such"), "unknown model 'no-such'"),
        (("codex", "-p", "hello"), "-p"),
    ],
)
def test_a_launch_error_is_one_line_and_starts_nothing(
    words: tuple[str, ...], reason: str, refused: Any, agents: dict[str, str], tiny_gguf: Path
):
    words = tuple(str(tiny_gguf) if word == "TINY" else word for word in words)
    assert reason in refused("launch", *words, env=agents)


def test_launch_requires_context_for_a_first_response():
    reason = "opencode sends about 8,000 tokens, but smollm2-135m holds 8,192"
    server = Endpoint("http://127.0.0.1:8000", "none", "smollm2-135m", 8192)
    with pytest.raises(InvalidRequest, match=reason):
        launch._call("opencode", ["opencode"], server)
    assert launch._call("opencode", ["opencode"], server._replace(context=9216))


@pytest.mark.parametrize(
    ("agent", "package"), [("claude", "@anthropic-ai/claude-code"), ("codex", "@openai/codex")]
)
def test_launch_prints_how_to_install_a_missing_agent(
    agent: str, package: str, mistake: Any, monkeypatch: Any
):
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"npm install -g {package}" in mistake("launch", agent)


def test_launch_prints_why_a_server_does_not_start(
    run: Run, agents: dict[str, str], endless_gguf: Path, tmp_path: Path
):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(endless_gguf.read_bytes()[:-4096])
    done = run("launch", "codex", "-m", cut, env=agents)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("paceline: ")
