"""Plugins add engines and commands; a broken one is a one-line error, and only if it is used."""

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import plugins
from paceline.cli.app import main
from paceline.engines import EngineSettings, open_engine
from paceline.errors import InvalidRequest
from support.process import python
from support.words import commands

Install = Callable[..., None]

ACME = """
    from paceline.cli.options import command, group
    from paceline.engines import open_engine as open_core_engine

    app = group()

    @command(app)
    def dance(*, steps: int = 3) -> int:
        \"\"\"Dance.\"\"\"
        print(steps)
        return 0

    def open_engine(path, context_length, settings):
        engine = open_core_engine("llamacpp", path, context_length, settings)
        engine.name = "acme"
        return engine
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package with a module `acme` and these entry points by group."""

    def install(source: str = ACME, **groups: dict[str, str]) -> None:
        (tmp_path / "acme.py").write_text(textwrap.dedent(source))
        metadata = tmp_path / "acme-1.0.dist-info"
        metadata.mkdir()
        lines = ["[console_scripts]", "acme = acme:main"]
        for group, entries in groups.items():
            lines += [f"[paceline.{group}]", *(f"{key} = {to}" for key, to in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "acme", raising=False)

    return install


def test_a_plugin_adds_commands_to_paceline_and_to_bench(
    install: Install, capsys: pytest.CaptureFixture[str]
):
    install(commands=dict.fromkeys(("dance", "bench.dance"), "acme:app"))
    assert main(["dance", "--steps", "4"]) == 0
    assert main(["bench", "dance"]) == 0
    assert capsys.readouterr().out == "4\n3\n"
    assert {("dance",), ("bench", "dance")} <= {name for name, _ in commands()}


def test_a_plugin_adds_an_engine_for_gguf_files(
    install: Install, tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    install(engines={"acme": "acme:open_engine"})
    words = ["generate", "hello", "--max-tokens", "4", "--json", "--model", str(tiny_gguf)]
    assert main([*words, "--engine", "acme"]) == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 4
    with pytest.raises(InvalidRequest):
        open_engine("other", tiny_gguf, 64, EngineSettings())


@pytest.mark.parametrize("target", ["acme:app", "acme:missing", "nowhere:app", "acme:NUMBER"])
def test_a_broken_plugin_command_is_a_one_line_error_only_if_used(
    target: str, install: Install, capsys: pytest.CaptureFixture[str]
):
    source = "NUMBER = 1" if target == "acme:NUMBER" else "raise RuntimeError('a\\nb')"
    install(source, commands={"dance": target, "generate": "acme:app"})
    assert main(["--help"]) == 0
    assert main(["generate", "--help"]) == 0
    capsys.readouterr()
    assert ("dance",) in {name for name, _ in commands()}
    for words in (["dance"], ["dance", "--help"]):
        assert main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("paceline: ")
        assert target in lines[0] or "Typer" in lines[0]


def test_a_broken_plugin_engine_is_a_paceline_error(install: Install, tiny_gguf: Path):
    install("", engines={"acme": "acme:open_engine", "llamacpp": "acme:open_engine"})
    with pytest.raises(plugins.PluginError):
        open_engine("acme", tiny_gguf, 64, EngineSettings())
    assert open_engine("llamacpp", tiny_gguf, 64, EngineSettings()).name == "llamacpp"


def test_a_built_in_engine_opens_without_reading_entry_points(tiny_gguf: Path):
    script = """
import sys
from pathlib import Path
from paceline import plugins
from paceline.engines import EngineSettings, open_engine

plugins.names = plugins.load = None
open_engine("llamacpp", Path(sys.argv[1]), 64, EngineSettings())
"""
    python("-c", script, tiny_gguf)


def test_this_distribution_declares_the_entry_points_of_its_packages():
    assert {"coreml", "mlx"} <= {*plugins.names(plugins.ENGINES)}
    added: list[Any] = [plugins.load(plugins.COMMANDS, n) for n in plugins.names(plugins.COMMANDS)]
    assert all(added)
