"""Commands use the network only for models, and write only to the cache folder.

Each runs as a user starts it: with an empty home, and without the variables that stop libraries
from reporting.
"""

import getpass
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import mlx
from support.command import served
from support.fake_hub import FakeHub, FakeRepository, serving
from support.process import python
from support.results import RUN

HOOK = """
import json, os, sys

log = os.open(os.environ["WATCHED_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        entry = "host", arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        entry = "host", arguments[1][0]
    elif event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & writes:
        entry = "file", os.path.abspath(arguments[0])
    elif event == "os.mkdir":
        entry = "file", os.path.abspath(arguments[0])
    else:
        return
    kind, name = entry
    name = os.fsdecode(name) if isinstance(name, bytes) else name
    os.write(log, (json.dumps([kind, name]) + "\\n").encode())

sys.addaudithook(watch)
"""

_THIS_MACHINE = (None, "", "localhost", "127.0.0.1", "::1")

_SWITCHES = (*("CI", "TF_BUILD", "JENKINS_URL"), *("DO_NOT_TRACK", "DISABLE_TELEMETRY"))
"""Variables that stop libraries from reporting; a user's machine has none of them."""

_USER = ("HF_", "MPL", "PACELINE_", "TORCH", "XDG_")
"""Beginnings of variables that name a user's folders and habits."""

_DEVICES = (Path("/dev"), Path("/proc/self"))

_LIBRARIES = ("mlx", f"torchinductor_{getpass.getuser()}")
"""Left in the folder of temporary files: kernels of MLX without a GPU; torch's folder, empty."""


class Home:
    """An empty home, a cache folder and a current folder; processes that are started have them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = folder / "cache"
        self._home, self._temporary = folder / "home", folder / "temporary"
        self._current, hook = folder / "current", folder / "hook"
        for path in (self.cache, self._home, self._temporary, self._current, hook):
            path.mkdir()
        self._log = folder / "log"
        (hook / "sitecustomize.py").write_text(HOOK)
        for name in [*os.environ]:
            if name in _SWITCHES or name.startswith(_USER):
                monkeypatch.delenv(name)
        for name, value in {
            **{"HOME": self._home, "USERPROFILE": self._home, "TMPDIR": self._temporary},
            **{"PACELINE_CACHE": self.cache, "WATCHED_LOG": self._log, "PYTHONPATH": hook},
            "PYTHONDONTWRITEBYTECODE": 1,
        }.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(self._current)

    def run(self, *words: object, stdin: str = "") -> str:
        """Run a command of paceline to its end, without an error, and return its output."""
        return python("-m", "paceline", *words, input=stdin).stdout

    def hosts(self) -> set[str]:
        """Other machines that were looked up or called, by name or address."""
        hosts = {name for kind, name in self._entries() if kind == "host"}
        return {host for host in hosts if host not in _THIS_MACHINE}

    def written(self, *named: str) -> set[str]:
        """Files outside of the cache folder that were written, or folders that were made.

        Without `named`, those in the current folder that the command had to write, and without
        what is gone from there or was temporary.
        """
        allowed = (
            *(self.cache, *_DEVICES),
            *(self._current / name for name in named),
            *(self._temporary / name for name in _LIBRARIES),
        )
        left = [
            path
            for folder in (self._home, self._current, self._temporary)
            for path in folder.rglob("*")
        ]
        temporary = (self._temporary, self._current, self._log)
        opened = [
            path
            for kind, name in self._entries()
            if kind == "file" and not _is_in(path := Path(name), temporary)
        ]
        return {str(path) for path in (*left, *opened) if not _is_in(path, allowed)}

    def _entries(self) -> Iterator[tuple[str, str]]:
        for line in self._log.read_text().splitlines():
            kind, name = json.loads(line)
            yield kind, name


def _is_in(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


NAME = "owner/tiny"
ANSWER = ("--max-tokens", 4, "--ignore-eos")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


@pytest.fixture
def hub(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that commands use; its cache folder is in ours."""
    with serving() as hub:
        for name, value in hub.environment(home.cache / "hub").items():
            monkeypatch.setenv(name, value)
        yield hub


def assert_alone(home: Home, *named: str) -> None:
    assert home.hosts() == set(), "another machine was called"
    assert home.written(*named) == set(), "written outside of the cache folder"


def test_generate_chat_and_models_leave_the_machine_alone(home: Home, tiny_gguf: Path):
    home.run("generate", "hello", "--model", tiny_gguf, *ANSWER)
    home.run("generate", "hello", "--model", tiny_gguf, *ANSWER, "--keep", "--offline")
    home.run("chat", "--model", tiny_gguf, *ANSWER, stdin="hello\nagain\n")
    home.run("models")
    home.run("forget")
    assert_alone(home)


def test_serve_leaves_the_machine_alone(home: Home, tiny_gguf: Path):
    with served(tiny_gguf, home.cache, "--port", "0", "--keep", "--prompt-cache", "0.1") as server:
        complete(server.url)
    assert_alone(home)


def complete(url: str) -> None:
    body = {"prompt": "hello", "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["choices"]


def test_pull_and_the_router_only_request_model_files(home: Home, hub: FakeHub, tiny_gguf: Path):
    hub.repositories[NAME] = FakeRepository({"tiny-F16.gguf": tiny_gguf.read_bytes()})
    home.run("pull", f"{NAME}:f16")
    assert hub.downloads()
    assert [asked.path for asked in hub.asked if NAME not in asked.path] == []
    with served(f"{NAME}:F16", home.cache, "--port", "0", "--all") as server:
        complete(server.url)  # each model is loaded by a process of its own
    assert_alone(home)


@pytest.mark.slow
def test_learn_verify_and_charts_leave_the_machine_alone(
    home: Home, tiny_gguf: Path, suite_file: Path, tmp_path: Path
):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"prompt": "zebra"}\n')
    home.run("learn", tiny_gguf, "--prompts", tmp_path / "prompts.jsonl", "--tokens", 1)
    options = ("--max-tokens", 1, "--drafter", "none", "--suite", suite_file)
    home.run("verify", "--model", tiny_gguf, *options)
    (tmp_path / "run.json").write_text(json.dumps(RUN.as_dict()))
    home.run("bench", "report", tmp_path / "run.json", "--output", "report")
    assert_alone(home, "report")


@pytest.mark.coreml
@pytest.mark.slow
def test_conversion_to_core_ml_leaves_the_machine_alone(home: Home, tiny_gguf: Path):
    pytest.importorskip("coremltools")
    pytest.importorskip("transformers", minversion="5.23")
    recipe = ("--topology", "1+1", "--head-rows", 200, "--slots", 128)
    home.run("convert", tiny_gguf, "--to", "coreml", *recipe)
    home.run("generate", "hello", "--model", f"{tiny_gguf}@coreml", *ANSWER)
    assert_alone(home)


@pytest.mark.mlx
@pytest.mark.slow
def test_an_mlx_model_leaves_the_machine_alone(home: Home, tmp_path: Path):
    mlx.needs()
    folder = tmp_path / "checkpoint"
    mlx.checkpoint(folder, "llama")
    home.run("generate", "hello", "--raw", "--model", folder, "--engine", "mlx", *ANSWER)
    assert_alone(home)
