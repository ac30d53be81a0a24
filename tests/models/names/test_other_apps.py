"""GGUF files of Ollama, used in place."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelNotFound
from paceline.models import list_models, resolve
from paceline.models.names.other_apps import find_app_model, is_app_name, ollama_models
from support.errors import raises
from support.ollama import MODEL_LAYER, pulled

TENSOR_LAYER = "application/vnd.ollama.image.tensor"


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    return folder


def test_ollama_models_keep_their_ollama_names(ollama: Path):
    blobs = {
        "ollama/qwen3:0.6b": pulled(ollama, "registry.ollama.ai/library/qwen3/0.6b"),
        "ollama/somebody/model:latest": pulled(ollama, "registry.ollama.ai/somebody/model/latest"),
        "ollama/hf.co/owner/name:Q4_K_M": pulled(ollama, "hf.co/owner/name/Q4_K_M"),
    }
    by_name = {model.name: model for model in ollama_models()}
    assert {name: model.path for name, model in by_name.items()} == blobs
    for name, model in by_name.items():
        assert model.bytes == 4
        assert is_app_name(name)
        assert find_app_model(name) == model.path
    blob = pulled(ollama, "registry.ollama.ai/library/Llama/latest")
    for name in ("ollama/llama", "ollama/Llama:latest", "ollama/LLAMA:Latest"):
        assert find_app_model(name) == blob


def test_errors_for_a_missing_model_of_another_app_list_its_models(ollama: Path):
    with raises(ModelNotFound, "hf.co/ollama/qwen3"):
        find_app_model("ollama/qwen3")
    pulled(ollama, "registry.ollama.ai/library/qwen3/0.6b")
    with raises(ModelNotFound, "ollama/qwen3", "ollama/qwen3:0.6b"):
        find_app_model("ollama/qwen3")


LAYERS: list[Any] = [
    "none",
    [{"mediaType": MODEL_LAYER, "digest": "sha256:../../x", "size": 1}],
    [{"mediaType": MODEL_LAYER, "digest": "sha256:" + "0" * 64, "size": 1}],
    [{"mediaType": MODEL_LAYER, "digest": 7, "size": 1}],
    [{"mediaType": TENSOR_LAYER, "digest": "sha256:" + "0" * 64, "size": 1}],
]


def test_corrupt_models_and_models_without_gguf_are_skipped(ollama: Path):
    pulled(ollama, "registry.ollama.ai/library/good/1")
    for number, layers in enumerate(LAYERS):
        pulled(ollama, f"registry.ollama.ai/library/a/{number}", layers=layers)
    pulled(ollama, "registry.ollama.ai/library/bad/1")
    (ollama / "manifests/registry.ollama.ai/library/bad/1").write_bytes(b"\xff{")
    (ollama / "manifests/registry.ollama.ai/library/loose").write_text("{}")
    assert [model.name for model in ollama_models()] == ["ollama/good:1"]
    shutil.rmtree(ollama)
    ollama.write_text("a file where a folder should be")
    assert ollama_models() == []


def test_another_apps_model_is_used_in_place_and_listed_once(
    ollama: Path, tiny_gguf: Path, tmp_path: Path
):
    blob = pulled(ollama, "registry.ollama.ai/library/tiny/1b", tiny_gguf.read_bytes())
    before = [*ollama.rglob("*")]
    files = resolve("ollama/tiny:1b", tmp_path / "cache")
    assert (files.name, files.context_length) == ("ollama/tiny:1b", 512)
    by_name = {model.name: model for model in list_models(tmp_path / "cache")}
    listed = by_name["ollama/tiny:1b"]
    assert listed.here
    assert (listed.file, listed.folder) == (blob, files.folder)
    assert listed.fits
    assert [*ollama.rglob("*")] == before
    assert str(blob) not in {model.name for model in list_models(tmp_path / "cache")}
