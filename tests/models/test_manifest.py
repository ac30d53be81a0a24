"""Folders of models: their manifests, errors of other folders, and files that change."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters.table import Table
from paceline.errors import ModelError
from paceline.models import ModelFiles, Progress, resolve
from paceline.models.files import open_checkpoint, open_folder
from paceline.models.manifest import (
    GGUF_WEIGHTS,
    TOKENIZER,
    Facts,
    changed_files,
    read_manifest,
    write_manifest,
)
from paceline.storage import manifest as manifests
from paceline.storage.files import sha256_of
from paceline.storage.manifest import MANIFEST
from paceline.storage.progress import QUIET
from paceline.system.machine import cache_dir
from support.errors import raises

RECORD = {"bytes": 1, "sha256": "0" * 64}
FACTS = Facts(512, (0, 2), 1, True, "<s>", None, "cc0-1.0")
SOURCE = {"kind": "gguf", "from": "/somewhere/é.gguf"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (GGUF_WEIGHTS, TOKENIZER):
        (tmp_path / name).write_text(f"the {name}")
    write_manifest(tmp_path, "a model", SOURCE, FACTS)
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    """Change values of a manifest, or facts in it; `...` removes one."""
    content = json.loads((folder / MANIFEST).read_text())
    for name, value in values.items():
        place = content["facts"] if name in content["facts"] else content
        place.pop(name) if value is ... else place.update({name: value})
    (folder / MANIFEST).write_text(json.dumps(content))


def fault_of(folder: Path) -> str:
    with raises(ModelError, folder / MANIFEST, lines=5) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_a_manifest_is_read_back(folder: Path):
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.source, manifest.facts) == ("a model", SOURCE, FACTS)
    assert manifest.made_by.startswith("paceline ")
    assert {name: record.bytes for name, record in manifest.files.items()} == {
        name: len(f"the {name}") for name in (GGUF_WEIGHTS, TOKENIZER)
    }
    assert changed_files(folder, manifest) == []


def test_a_manifest_with_top_level_facts_is_read(folder: Path):
    content = json.loads((folder / MANIFEST).read_text())
    facts = content.pop("facts")
    content["format"] = content.pop("kind")
    (folder / MANIFEST).write_text(json.dumps({**content, **facts}))
    assert read_manifest(folder).facts == FACTS


def test_the_fingerprint_depends_only_on_the_weights(folder: Path):
    before = read_manifest(folder).fingerprint
    (folder / TOKENIZER).write_text("another")
    write_manifest(folder, "another name", {}, FACTS)
    assert read_manifest(folder).fingerprint == before
    (folder / GGUF_WEIGHTS).write_text("others")
    write_manifest(folder, "a model", SOURCE, FACTS)
    assert read_manifest(folder).fingerprint != before


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"kind": "other"}, r"kind: .*'paceline-model' or 'coreml-model', not 'other'"),
        ({"kind": ...}, "kind: "),
        ({"version": 2}, "version: .*1, not 2"),
        ({"source": {"kind": 1}}, r"source\.kind: .*not 1"),
        ({"context_length": 0}, "context_length: .*1, not 0"),
        ({"stop_token_ids": [1, -1]}, r"stop_token_ids\.1: .*not -1"),
        ({"bos_token_id": None}, "add_bos is true but bos_token_id is missing"),
        ({"eos_token": ...}, "eos_token: "),
        ({"files": []}, r"files: .*not \[\]"),
        ({"files": {}}, f"files does not list .*{GGUF_WEIGHTS}"),
        ({"files": {"x": {**RECORD, "bytes": -1}}}, r"files\.x\.bytes: "),
        ({"files": {"x": {**RECORD, "sha256": "12"}}}, r"files\.x\.sha256: "),
        ({"files": {"/etc/passwd": RECORD}}, "'/etc/passwd', expected a file in this folder"),
        ({"files": {"a/../../b": RECORD}}, "'a/../../b', expected a file in this folder"),
    ],
)
def test_an_invalid_manifest_value_is_named(values: dict[str, Any], fault: str, folder: Path):
    change(folder, **values)
    assert re.search(fault, fault_of(folder))


def refusal(folder: Path) -> str:
    with raises(ModelError, folder) as caught:
        open_folder(folder, "m")
    return str(caught.value)


def test_a_models_size_counts_the_files_its_engine_opens(
    tiny_files: ModelFiles, exported: Path, tiny_gguf: Path
):
    assert tiny_files.weights_bytes == tiny_gguf.stat().st_size
    size = (exported / "model.safetensors").stat().st_size
    assert open_checkpoint(exported, "m").weights_bytes > size
    linked = exported.parent / "linked"
    linked.mkdir()
    for file in exported.iterdir():
        (linked / file.name).symlink_to(file)
    assert open_checkpoint(linked, "m").weights_bytes > size


def test_a_hugging_face_checkpoint_error_suggests_an_alternative(tmp_path: Path):
    for name in ("model.safetensors", "config.json", TOKENIZER):
        (tmp_path / name).write_text("{}")
    message = refusal(tmp_path)
    for advice in ("Hugging Face checkpoint", "GGUF", "--engine mlx", "--to coreml"):
        assert advice in message


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("model.gguf", "give the path {}/model.gguf"),
        ("openvino_model.xml", "is an OpenVINO model"),
        ("notes.txt", "is not a model: expected a GGUF file"),
    ],
)
def test_a_folder_without_a_model_is_rejected_with_advice(tmp_path: Path, file: str, advice: str):
    (tmp_path / file).write_text("GGUF")
    assert advice.format(tmp_path) in refusal(tmp_path)


def test_a_missing_or_unnamed_gguf_file_is_an_error(tiny_files: ModelFiles, tmp_path: Path):
    folder = tmp_path / "m"
    shutil.copytree(tiny_files.folder, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, fault in ((str(tmp_path / "moved.gguf"), "moved.gguf is missing"), ("", "no from")):
        manifest["source"]["from"] = name
        if not name:
            del manifest["source"]["from"]
        (folder / MANIFEST).write_text(json.dumps(manifest))
        assert fault in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", TOKENIZER, "tokenizer_config.json"])
def test_a_file_whose_content_contradicts_its_name_is_named(name: str, exported: Path):
    (exported / name).write_text("<html>")
    with raises(ModelError, exported, name):
        open_checkpoint(exported, "m")


@pytest.fixture
def prepared(tiny_stored: ModelFiles, tmp_path: Path, cache: Path) -> Path:
    """A copy of a prepared model with its weights."""
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
    """Reverse a part in the middle of a file without changing its size."""
    content = path.read_bytes()
    third = len(content) // 3
    path.write_bytes(content[:third] + content[third : 2 * third][::-1] + content[2 * third :])


def test_changed_weights_of_equal_size_are_a_single_error_with_a_fix(
    prepared: Path, capsys: pytest.CaptureFixture[str]
):
    assert open_folder(prepared, "m", Progress()).folder == prepared
    assert "checking" in capsys.readouterr().err
    reverse_middle(prepared / GGUF_WEIGHTS)
    with raises(ModelError, "SHA-256", prepared, GGUF_WEIGHTS, "remove this folder"):
        open_folder(prepared, "m", QUIET)


def test_unchanged_and_just_created_files_are_not_rehashed(prepared: Path, hashed: list[str]):
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
    manifest = read_manifest(prepared)
    (prepared / MANIFEST).unlink()
    os.utime(prepared / GGUF_WEIGHTS)
    write_manifest(prepared, "m", manifest.source, manifest.facts)
    hashed.clear()
    open_folder(prepared.rename(prepared.with_name("moved")), "m", QUIET)
    assert hashed == []


def test_an_unwritable_cache_does_not_fail_a_model(
    prepared: Path, hashed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        open_folder(prepared, "m", QUIET)
    assert hashed.count(GGUF_WEIGHTS) == 2


def test_few_checksum_records_are_kept(prepared: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifests, "_MAX_MARKS", 3)
    for second in range(6):
        os.utime(prepared / GGUF_WEIGHTS, (second, second))
        open_folder(prepared, "m", QUIET)
    assert len([*(cache_dir() / "checked").iterdir()]) == 3
    assert manifests.is_checked(prepared, read_manifest(prepared).files)


def test_a_changed_gguf_file_is_a_different_model(tiny_gguf: Path, tmp_path: Path, cache: Path):
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


def test_a_table_with_changed_counts_is_rejected(toy_table: Path, tmp_path: Path, cache: Path):
    folder = Path(shutil.copytree(toy_table, tmp_path / "table"))
    Table.open(folder, 6)
    name = next(iter(json.loads((folder / MANIFEST).read_text())["files"]))
    reverse_middle(folder / name)
    with raises(ModelError, "SHA-256"):
        Table.open(folder, 6)
