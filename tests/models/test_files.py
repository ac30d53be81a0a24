import json
import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import ModelFiles
from paceline.models.files import open_folder
from paceline.models.manifest import MANIFEST, REQUIRED, TOKENIZER
from support.errors import raises

GRAPH, WEIGHTS, _ = REQUIRED


def refusal(folder: Path) -> str:
    with raises(ModelError, folder) as caught:
        open_folder(folder, "m")
    return str(caught.value)


def test_a_prepared_folder_is_opened_by_its_manifest(tiny_files: ModelFiles, tiny_gguf: Path):
    files = open_folder(tiny_files.folder, "any name")
    assert files.name == "any name"
    assert files.source == f"gguf file: {tiny_gguf}"
    assert files.path == files.weights == tiny_gguf
    assert len(files.fingerprint) == 64


def test_a_folder_that_others_exported_is_used_where_it_is(exported: Path):
    files = open_folder(exported, "m")
    assert files.folder == exported
    assert files.context_length == 512
    assert files.stop_token_ids == (0, 2)
    assert files.chat_template is not None
    assert (files.engine, files.path) == ("openvino", exported)


def test_the_bytes_of_a_model_are_those_that_its_engine_opens(
    tiny_files: ModelFiles, exported: Path, tiny_gguf: Path
):
    assert tiny_files.weights_bytes == tiny_gguf.stat().st_size
    size = (exported / WEIGHTS).stat().st_size
    assert open_folder(exported, "m").weights_bytes > size
    linked = exported.parent / "linked"
    linked.mkdir()
    for file in exported.iterdir():
        (linked / file.name).symlink_to(file)
    assert open_folder(linked, "m").weights_bytes > size


def test_the_identity_of_an_exported_folder_changes_with_its_weights(exported: Path):
    before = open_folder(exported, "m").fingerprint
    assert open_folder(exported, "m").fingerprint == before
    stat = (exported / WEIGHTS).stat()
    os.utime(exported / WEIGHTS, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    assert open_folder(exported, "m").fingerprint != before


def test_every_piece_that_is_missing_is_named_at_once(exported: Path):
    for name in (WEIGHTS, TOKENIZER, "config.json"):
        (exported / name).unlink()
    assert f"{WEIGHTS}, {TOKENIZER}, config.json missing" in refusal(exported)
    (exported / GRAPH).unlink()
    assert f"is not an OpenVINO model: {GRAPH}, {WEIGHTS}, {TOKENIZER}" in refusal(exported)


def test_a_hugging_face_checkpoint_comes_with_what_to_use_instead(tmp_path: Path):
    for name in ("model.safetensors", "config.json", TOKENIZER):
        (tmp_path / name).write_text("{}")
    message = refusal(tmp_path)
    for advice in ("Hugging Face checkpoint", "GGUF", "--engine mlx", "--to coreml"):
        assert advice in message


def test_a_folder_with_a_gguf_file_comes_with_its_path(tmp_path: Path):
    (tmp_path / "model.gguf").write_text("GGUF")
    assert f"give the path {tmp_path / 'model.gguf'}" in refusal(tmp_path)


def test_a_gguf_file_that_is_gone_or_not_named_is_an_error(tiny_files: ModelFiles, tmp_path: Path):
    folder = tmp_path / "m"
    shutil.copytree(tiny_files.folder, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, fault in ((str(tmp_path / "moved.gguf"), "moved.gguf is gone"), ("", "no from")):
        manifest["source"]["from"] = name
        if not name:
            del manifest["source"]["from"]
        (folder / MANIFEST).write_text(json.dumps(manifest))
        assert fault in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", TOKENIZER, "tokenizer_config.json"])
def test_a_file_that_is_not_what_its_name_says_is_named(name: str, exported: Path):
    (exported / name).write_text("<html>")
    assert name in refusal(exported)
