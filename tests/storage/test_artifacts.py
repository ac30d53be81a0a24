import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.storage.files import read_json, sha256_of, write_json
from paceline.storage.manifest import MANIFEST, read_manifest, write_manifest
from support.errors import raises


@pytest.mark.parametrize("content", [None, b"", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_not_a_json_object_is_named_in_one_line(
    content: bytes | None, tmp_path: Path
):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with raises(ModelError, path):
        read_json(path)


def test_checksum_progress_continues_from_the_bytes_already_done(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(b"x" * 3_000_000)
    reached: list[int] = []
    digest = sha256_of(path, reached.append, 10)
    assert reached == sorted(reached)
    assert reached[-1] == 3_000_010
    assert digest == sha256_of(path)


def test_json_is_written_atomically(tmp_path: Path):
    path = tmp_path / "x.json"
    write_json(path, {"a": "é"})
    assert read_json(path) == {"a": "é"}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": "é"}
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "nowhere" / "x.json", {})
    assert [result.name for result in tmp_path.iterdir()] == ["x.json"]


@dataclass(frozen=True)
class Box:
    size: int


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(b"abc")
    write_manifest(tmp_path, "paceline thing", {"size": 3}, ["a.bin"])
    return tmp_path


def test_a_manifest_describes_an_artifact(artifact: Path):
    assert read_manifest(artifact, "paceline thing", Box) == Box(3)
    files = json.loads((artifact / MANIFEST).read_text())["files"]
    assert files == {"a.bin": {"bytes": 3, "sha256": sha256_of(artifact / "a.bin")}}


def test_an_artifact_folder_of_another_kind_is_rejected(artifact: Path):
    with raises(ModelError, "version 1", "box"):
        read_manifest(artifact, "paceline box", Box)
    (artifact / MANIFEST).unlink()
    with raises(ModelError, "manifest.json"):
        read_manifest(artifact, "paceline box", Box)


SHA256 = "0" * 64


def test_all_missing_and_invalid_files_are_reported_together(artifact: Path):
    value = json.loads((artifact / MANIFEST).read_text())
    value["files"] = {
        "b.bin": {"bytes": 1, "sha256": SHA256},
        "a.bin": {"bytes": 1, "sha256": SHA256},
    }
    (artifact / MANIFEST).write_text(json.dumps(value))
    with raises(ModelError, "b.bin", "a.bin has 3 bytes", lines=3):
        read_manifest(artifact, "paceline thing", Box)
