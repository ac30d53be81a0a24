"""Checkpoints that become models in the cache folder: converted once, opened as GGUF files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.errors import ModelError
from paceline.models import convert, list_models, resolve
from paceline.models.manifest import GGUF_WEIGHTS
from paceline.models.prepare import models_dir
from support.errors import raises
from support.fake_hub import FakeHub, FakeRepository
from support.tiny_checkpoints import write_checkpoint


@pytest.mark.parametrize(
    ("family", "instead"), [("mamba", "paceline models"), ("glm4", "--engine llamacpp")]
)
def test_a_checkpoint_of_an_unknown_family_is_refused_by_name(
    family: str, instead: str, tmp_path: Path
):
    checkpoint, cache = write_checkpoint("qwen3", tmp_path / "checkpoint"), tmp_path / "cache"
    (checkpoint / "config.json").write_text(json.dumps({"model_type": family}))
    for name in (str(checkpoint), f"{checkpoint}@int4"):
        with raises(
            ModelError, f"the family {family} cannot be converted; expected one of", instead
        ):
            resolve(name, cache)
    with raises(ModelError, family):
        convert(str(checkpoint), "int8", cache)
    assert not cache.exists()


def test_a_family_that_does_not_run_here_yet_is_refused_by_name(tmp_path: Path):
    folder = write_checkpoint("gemma2", tmp_path / "checkpoint")
    with raises(ModelError, "gemma2"):
        convert(str(folder), "int8", tmp_path / "cache")


def test_a_checkpoint_is_converted_when_it_is_used(tmp_path: Path):
    folder, cache = write_checkpoint("qwen3", tmp_path / "checkpoint"), tmp_path / "cache"
    files = resolve(str(folder), cache)
    assert files.path == files.folder / GGUF_WEIGHTS
    assert files.context_length == 512
    assert files.name == str(folder)
    text = "and then"
    assert files.tokenizer().decode(files.tokenizer().encode(text)) == text
    time = files.path.stat().st_mtime_ns
    assert resolve(str(folder), cache).path.stat().st_mtime_ns == time
    assert resolve(f"{folder}@int8", cache).fingerprint == files.fingerprint
    names = [model.name for model in list_models(cache) if model.folder == files.folder]
    assert names == [f"{folder}@int8"]
    assert [path.name for path in models_dir(cache).iterdir()] == [files.folder.name]


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        *[("llama3", weights) for weights in ("int8", "int4", "f16")],
        *[("qwen3_moe", "int4"), ("gemma4_text", "int4"), ("gpt_oss-mxfp4", "int8")],
    ],
)
def test_a_converted_checkpoint_runs(form: str, weights: str, tmp_path: Path):
    folder = write_checkpoint(form, tmp_path / "checkpoint", dtype="BF16")
    files = convert(str(folder), weights, tmp_path / "cache")
    engine = open_engine("openvino", files.path, files.context_length, EngineSettings())
    rows = engine.step([(engine.open(), Block([5, 9, 2, 14, 7], 5))]).logits[0]
    assert rows.shape == (5, 320)
    assert np.isfinite(rows).all()
    assert rows.std() > 0.1


def test_a_checkpoint_of_the_hub_is_fetched_and_converted_when_it_is_used(
    fake: FakeHub, tmp_path: Path
):
    folder, cache = write_checkpoint("qwen3", tmp_path / "checkpoint"), tmp_path / "cache"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    twice = {"original/model.safetensors": b"the same", "consolidated.safetensors": b"again"}
    fake.repositories["owner/tiny"] = FakeRepository({**files, **twice})
    result = resolve("owner/tiny", cache)
    assert result.path == result.folder / GGUF_WEIGHTS
    assert result.name == "owner/tiny"
    (fetched,) = [download.path for download in fake.downloads()]
    assert fetched.endswith("model.safetensors")
    fake.asked.clear()
    assert resolve("owner/tiny", cache).folder == result.folder
    assert resolve("owner/tiny@int8", cache).folder == result.folder
    assert fake.asked == []


def test_a_revision_of_a_checkpoint_is_a_model_of_its_own(fake: FakeHub, tmp_path: Path):
    cache, files = tmp_path / "cache", []
    for vocabulary in (320, 352):
        folder = write_checkpoint("qwen3", tmp_path / "checkpoint", vocab_size=vocabulary)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    fake.repositories["owner/tiny"] = FakeRepository(files[0], older=files[1])
    main, older = resolve("owner/tiny", cache), resolve("owner/tiny", cache, revision="v1")
    assert main.folder != older.folder
    assert main.path.stat().st_size < older.path.stat().st_size
    assert resolve("owner/tiny", cache).folder == main.folder


def test_a_repository_without_a_tokenizer_is_refused(fake: FakeHub, tmp_path: Path):
    folder = write_checkpoint("qwen3", tmp_path / "checkpoint")
    (folder / "tokenizer.json").unlink()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    fake.repositories["owner/tiny"] = FakeRepository(files)
    with raises(ModelError, "tokenizer.json"):
        convert("owner/tiny", "int8", tmp_path / "cache")
    with raises(ModelError, "owner/tiny"):
        resolve("owner/tiny", tmp_path / "cache")


def test_a_truncated_checkpoint_leaves_nothing_behind(tmp_path: Path):
    folder = write_checkpoint("qwen3", tmp_path / "checkpoint")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with raises(ModelError, "model.safetensors"):
        resolve(str(folder), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_too_small_a_disk_is_said_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_checkpoint("qwen3", tmp_path / "checkpoint")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with raises(ModelError, "disk"):
        convert(str(folder), "int8", tmp_path / "cache")
    assert [*tmp_path.rglob("*.gguf")] == []


def test_weights_that_are_not_safetensors_are_refused_with_what_to_take(
    fake: FakeHub, tmp_path: Path
):
    folder, cache = write_checkpoint("qwen3", tmp_path / "checkpoint"), tmp_path / "cache"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fake.repositories["owner/old"] = FakeRepository(
        {path.name: path.read_bytes() for path in folder.iterdir()}
    )
    with raises(ModelError, "pytorch_model.bin", "GGUF"):
        resolve(str(folder), cache)
    with raises(ModelError, ".bin", "GGUF"):
        resolve("owner/old", cache)
    for name in (str(folder), "owner/old"):
        with raises(ModelError, "safetensors", "GGUF"):
            convert(name, "int8", cache)
    assert not cache.exists()
