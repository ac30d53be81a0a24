import json
import shutil
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import ModelFiles
from paceline.models.files import open_checkpoint, open_folder
from paceline.models.manifest import MANIFEST, TOKENIZER
from support.errors import raises


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


def test_the_bytes_of_a_model_are_those_that_its_engine_opens(
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


def test_a_hugging_face_checkpoint_comes_with_what_to_use_instead(tmp_path: Path):
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
def test_a_folder_without_a_model_is_refused_with_advice(tmp_path: Path, file: str, advice: str):
    (tmp_path / file).write_text("GGUF")
    assert advice.format(tmp_path) in refusal(tmp_path)


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
    with raises(ModelError, exported, name):
        open_checkpoint(exported, "m")
