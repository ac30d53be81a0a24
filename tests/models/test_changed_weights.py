"""A model whose files change on disk is refused, or is another model: never used as it was."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters.table import Table
from paceline.errors import ModelError
from paceline.models import ModelFiles, Progress, resolve
from paceline.models.files import open_folder
from paceline.models.manifest import GGUF_WEIGHTS, read_manifest, write_manifest
from paceline.storage import manifest as manifests
from paceline.storage.files import sha256_of
from paceline.storage.manifest import MANIFEST
from paceline.storage.progress import QUIET
from paceline.system.machine import cache_dir
from support.errors import raises


@pytest.fixture
def prepared(tiny_stored: ModelFiles, tmp_path: Path, cache: Path) -> Path:
    """A copy of a prepared model that has its weights."""
    return Path(shutil.copytree(tiny_stored.folder, tmp_path / "copy"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed."""
    names: list[str] = []

    def hashing(path: Path, *more: Any) -> str:
        names.append(path.name)
        return sha256_of(path, *more)

    monkeypatch.setattr(manifests, "sha256_of", hashing)
    return names


def reverse_middle(path: Path) -> None:
    """Reverse a part in the middle of a file, which keeps its size."""
    content = path.read_bytes()
    third = len(content) // 3
    path.write_bytes(content[:third] + content[third : 2 * third][::-1] + content[2 * third :])


def test_changed_weights_of_the_same_size_are_one_error_that_says_what_to_do(
    prepared: Path, capsys: pytest.CaptureFixture[str]
):
    assert open_folder(prepared, "m", Progress()).folder == prepared
    assert "checking" in capsys.readouterr().err
    reverse_middle(prepared / GGUF_WEIGHTS)
    with raises(ModelError, "SHA-256", prepared, GGUF_WEIGHTS, "remove this folder"):
        open_folder(prepared, "m", QUIET)


def test_unchanged_files_are_not_hashed_again(prepared: Path, hashed: list[str]):
    open_folder(prepared, "m", QUIET)  # a copy: other times and inodes
    assert GGUF_WEIGHTS in hashed
    hashed.clear()
    open_folder(prepared, "m", QUIET)
    assert hashed == []
    os.utime(prepared / GGUF_WEIGHTS)
    open_folder(prepared, "m")
    assert hashed == [], "a list of models hashes nothing"
    for _ in range(2):
        open_folder(prepared, "m", QUIET)
    assert hashed.count(GGUF_WEIGHTS) == 1


def test_a_model_that_was_just_made_is_not_hashed_again(prepared: Path, hashed: list[str]):
    manifest = read_manifest(prepared)
    (prepared / MANIFEST).unlink()
    write_manifest(prepared, "m", manifest.source, manifest.facts)
    hashed.clear()
    moved = prepared.rename(prepared.with_name("moved"))
    open_folder(moved, "m", QUIET)
    assert hashed == []


def test_a_cache_that_cannot_be_written_does_not_fail_a_model(
    prepared: Path, hashed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        open_folder(prepared, "m", QUIET)
    assert hashed.count(GGUF_WEIGHTS) == 2


def test_few_marks_of_unchanged_files_are_kept(prepared: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifests, "_MAX_MARKS", 3)
    for second in range(6):
        os.utime(prepared / GGUF_WEIGHTS, (second, second))
        open_folder(prepared, "m", QUIET)
    assert len([*(cache_dir() / "checked").iterdir()]) == 3
    assert manifests.is_checked(prepared, read_manifest(prepared).files)


def test_a_changed_gguf_file_is_another_model(tiny_gguf: Path, tmp_path: Path, cache: Path):
    path = Path(shutil.copy2(tiny_gguf, tmp_path / "own.gguf"))
    before = resolve(str(path), cache)
    assert resolve(str(path), cache).fingerprint == before.fingerprint
    content = path.read_bytes()
    path.write_bytes(content[:-4] + content[-2:] + content[-4:-2])  # two weights swapped
    after = resolve(str(path), cache)
    assert after.fingerprint != before.fingerprint
    assert after.folder != before.folder
    Path(shutil.copy2(path, tmp_path / "other")).replace(path)  # with its size and time
    assert resolve(str(path), cache).fingerprint != after.fingerprint


def test_a_table_whose_counts_have_changed_is_refused(toy_table: Path, tmp_path: Path, cache: Path):
    folder = Path(shutil.copytree(toy_table, tmp_path / "table"))
    Table.open(folder, 6)
    name = next(iter(json.loads((folder / MANIFEST).read_text())["files"]))
    reverse_middle(folder / name)
    with raises(ModelError, "SHA-256"):
        Table.open(folder, 6)
