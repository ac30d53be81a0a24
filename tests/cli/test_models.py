"""`pull` and `models`, and models that cannot be used."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.models import DEFAULT_MODEL
from paceline.models.manifest import TOKENIZER
from paceline.models.names import known_models
from paceline.models.prepare import models_dir
from support.dflash import tiny_config, write_checkpoint
from support.ollama import pulled
from support.process import Run
from support.tiny import write_tiny


def test_pull_prepares_a_model_and_prints_its_path(run: Run, tiny_gguf: Path, tiny_files: Any):
    found = run("pull", tiny_gguf)
    assert found.stdout == f"{tiny_gguf} is ready in {tiny_files.folder}\n"
    value = json.loads(run("pull", tiny_gguf, "--json").stdout)
    assert value == {
        "name": str(tiny_gguf),
        "folder": str(tiny_files.folder),
        "source": tiny_files.source,
        "license": "cc0-1.0",
        "context_length": 512,
        "drafter": None,
    }


def test_models_are_listed_as_a_table_and_as_json(run: Run, cache: Path, tiny_files: Any):
    value = json.loads(run("models", "--json").stdout)
    assert {each["name"] for each in value} >= {DEFAULT_MODEL, tiny_files.name, *known_models()}
    (mine,) = (each for each in value if each["name"] == tiny_files.name)
    assert mine["here"]
    assert mine["fits"]
    assert mine["folder"] == str(tiny_files.folder)
    for each in mine["exactness"]:
        assert each["engine"]["engine"] == "llamacpp"
        assert min(compared["rows"] for compared in each["conditions"].values()) > 0
    here = [each["here"] for each in value]
    assert here == sorted(here, reverse=True), "installed models come first"
    assert mine["context_length"] == 512
    assert all(each["to_fetch"] > 0 for each in value if not each["here"])
    text = run("models").stdout
    assert "fits memory" in text
    assert f"{DEFAULT_MODEL} (default)" in text
    assert "to fetch" in text


def test_show_describes_a_model_without_its_weights(run: Run, tiny_gguf: Path, tiny_files: Any):
    value = json.loads(run("show", tiny_gguf, "--json").stdout)
    facts = {
        **{"name": str(tiny_gguf), "installed": True, "engine": "llamacpp", "license": "cc0-1.0"},
        **{"bytes": tiny_gguf.stat().st_size, "context_length": 512, "reasoning": False},
        **{"drafter": "suffix", "published": None, "chat_template": tiny_files.chat_template},
        **{"special_tokens": tiny_files.tokenizer.special_tokens(), "settings": {}},
        "end_tokens": [*tiny_files.stop_token_ids],
    }
    assert facts.items() <= value.items()
    assert value["on_disk"] >= value["bytes"]
    text = run("show", tiny_gguf).stdout
    assert re.search(r"^context_length +512$", text, re.MULTILINE)
    assert f"{len(tiny_files.chat_template)} characters" in text


def test_show_prints_the_source_of_each_setting(run: Run, tmp_path: Path):
    path = write_tiny(tmp_path / "set.gguf", fields={"general.sampling.temp": 0.5})
    assert json.loads(run("show", path, "--json").stdout)["settings"] == {
        "temperature": {"value": 0.5, "source": "model"}
    }
    assert "temperature 0.5 (model)" in run("show", path).stdout


def test_show_downloads_nothing_for_a_model_that_is_not_installed(
    run: Run, refused: Callable[..., str]
):
    value = json.loads(run("show", "qwen3-8b", "--json").stdout)
    assert (value["installed"], value["bytes"]) == (False, known_models()["qwen3-8b"].bytes)
    assert "`paceline pull qwen3-8b`" in run("show", "qwen3-8b").stdout
    assert "owner/name" in refused("show", "owner/name")
    assert "names with this prefix: qwen3-8b" in refused("show", "qwen3-8")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("paceline show qwen3-", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"]),
        ("paceline pull gpt", ["gpt-oss-20b"]),
        ("paceline learn gpt", ["gpt-oss-20b"]),
        ("paceline rm gpt", []),
        ("paceline chat --model gpt", ["gpt-oss-20b"]),
        ("paceline serve --engine ll", ["llamacpp"]),
        ("paceline generate --drafter n", ["none", "ngram"]),
        ("paceline serve --drafter suffix+t", ["suffix+table"]),
        ("paceline verify --drafter dfl", ["dflash"]),
        ("paceline bench run --drafter pre", ["prediction"]),
    ],
)
def test_a_shell_completes_models_drafters_and_engines(
    line: str, words: list[str], run: Run, environment: dict[str, str]
):
    asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": line}
    asked["COMP_CWORD"] = str(line.count(" "))
    assert run(env={**environment, **asked}).stdout.split() == words


def test_a_shell_completes_removable_names(run: Run, environment: dict[str, str], tiny_gguf: Path):
    asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": "paceline rm ", "COMP_CWORD": "2"}
    assert str(tiny_gguf) in run(env={**environment, **asked}).stdout.split()


def packed(cache: Path, path: Path) -> None:
    """A packed copy of a GGUF file, as the engine llamacpp makes one of a large file."""
    folder = cache / "packed"
    folder.mkdir(exist_ok=True)
    copy = folder / f"{len([*folder.iterdir()])}.gguf"
    copy.write_bytes(path.read_bytes())
    copy.with_suffix(".source").write_text(str(path), encoding="utf-8")


def listed_bytes(name: str, capsys: pytest.CaptureFixture[str]) -> int:
    """The sizes of a model's forms together, as `models` lists them."""
    capsys.readouterr()
    assert main(["models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    return sum(model["bytes"] for model in models if model["name"].partition("@")[0] == name)


def removed(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the names that `rm` reports as removed."""
    assert main(["rm", name, "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def disk_bytes(folder: Path) -> int:
    paths = folder.rglob("*")
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


@pytest.fixture
def new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty cache folders of paceline, Hugging Face and Ollama."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def test_files_derived_from_a_users_file_are_listed_and_removed(
    new_cache: Path, tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "mine.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    assert main(["pull", str(path)]) == 0
    packed(new_cache, path)
    packed(new_cache, tiny_gguf)
    size = listed_bytes(str(path), capsys)
    before = disk_bytes(new_cache)
    assert main(["rm", str(path), "--dry-run"]) == 0
    assert disk_bytes(new_cache) == before
    capsys.readouterr()
    gone = removed(str(path), capsys)
    assert gone["bytes"] == before - disk_bytes(new_cache) > path.stat().st_size
    assert gone["stays"] == [str(path)]
    assert size == gone["bytes"] + path.stat().st_size
    assert [*models_dir(new_cache).iterdir()] == []
    assert len([*new_cache.glob("packed/*")]) == 2, "copies of another file stay"
    assert main(["rm", str(path)]) == 2


def test_files_derived_from_an_ollama_model_are_listed_and_removed(
    new_cache: Path, tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    blob = pulled(tmp_path / "ollama", "registry.ollama.ai/library/tiny/q", tiny_gguf.read_bytes())
    assert main(["pull", "ollama/tiny:q"]) == 0
    packed(new_cache, blob)
    size = listed_bytes("ollama/tiny:q", capsys)
    before = disk_bytes(new_cache)
    gone = removed("ollama/tiny:q", capsys)
    assert gone["bytes"] == before - disk_bytes(new_cache) > blob.stat().st_size
    assert size == gone["bytes"] + blob.stat().st_size
    assert blob.is_file()
    for kept in ("models", "packed"):
        assert [path for path in (new_cache / kept).rglob("*") if not path.is_dir()] == []


def test_a_model_with_a_missing_file_is_not_installed_but_removable(
    new_cache: Path, tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "mine.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    assert main(["pull", str(path)]) == 0
    path.unlink()
    capsys.readouterr()
    assert main(["models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    (mine,) = (model for model in models if model["name"] == str(path))
    assert not mine["here"]
    assert "missing" in mine["about"]
    assert main(["generate", "x", "--model", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert removed(str(path), capsys)["bytes"] == mine["bytes"] > 0
    assert [*models_dir(new_cache).iterdir()] == []


def test_cached_draft_heads_are_listed_with_their_target(
    run: Run, tmp_path: Path, environment: dict[str, str]
):
    environment["HF_HUB_CACHE"] = str(tmp_path / "hub")
    repository = tmp_path / "hub" / "models--someone--tiny-dspark"
    folder = repository / "snapshots" / "abc"
    write_checkpoint(folder, tiny_config(first_drafted=0, causal=False))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    listed = json.loads(run("models", "--json").stdout)
    (mine,) = (each for each in listed if each["head"])
    assert mine["name"] == "someone/tiny-dspark"
    facts = {"kind": "dflash", "form": "DSpark", "hidden_size": 64, "vocab_size": 320, "layers": 2}
    assert mine["head"] == {"facts": facts, "fault": "", "models": []}
    assert "--drafter dflash:someone/tiny-dspark" in mine["about"]


def test_a_failed_model_check_exits_with_1(
    run: Run, refused: Any, tiny_gguf: Path, tmp_path: Path, environment: dict[str, str]
):
    environment["PACELINE_CACHE"] = str(tmp_path / "cache")
    name = str(tiny_gguf)
    assert run("pull", name).returncode == 0
    assert json.loads(run("models", "--check", "--json").stdout) == {"checked": 1}
    (folder,) = models_dir(tmp_path / "cache").iterdir()
    os.truncate(folder / TOKENIZER, 1000)
    assert f"{TOKENIZER} has 1000 bytes" in refused("models", "--check", code=1)
    assert "has 1000 bytes" in refused("generate", "x", "--model", name)


@pytest.mark.parametrize("command", ["generate", "pull", "plan", "chat", "verify"])
@pytest.mark.parametrize("kind", ["foreign", "truncated", "empty", "folder"])
def test_every_command_rejects_a_file_that_is_not_a_model(
    command: str, kind: str, mistake: Any, tiny_files: Any, tmp_path: Path
):
    path = tmp_path / "bad.gguf"
    cache = tiny_files.folder.parents[1]
    content = Path(tiny_files.name).read_bytes()
    if kind == "folder":
        path.mkdir()
    else:
        path.write_bytes({"foreign": b"%PDF-1.7", "truncated": content[:-99], "empty": b""}[kind])
    before = {*models_dir(cache).iterdir()}
    where = [path] if command == "pull" else ["--model", path]
    said = mistake(command, *where, *(["x"] if command == "generate" else []))
    assert str(path) in said
    assert {*models_dir(cache).iterdir()} == before
