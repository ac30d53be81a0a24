"""A weights form of a model, by any of its names: made of it, or refused with those that it has."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import InvalidRequest, ModelNotFound, PacelineError
from paceline.models import (
    DEFAULT_MODEL,
    ModelFiles,
    checkpoints,
    convert,
    names,
    prepare,
    pull,
    resolve,
)
from paceline.models.manifest import GGUF_WEIGHTS
from paceline.models.names import KnownModel, other_apps
from paceline.models.prepare import models_dir
from paceline.runtime.load import load
from support.errors import raises
from support.fake_hub import FakeHub, FakeRepository
from support.tiny import write_tiny
from support.tiny_checkpoints import write_checkpoint

NAME = "owner/tiny"
F16 = "tiny-F16.gguf"


@pytest.fixture(autouse=True)
def converted(monkeypatch: pytest.MonkeyPatch, exported: Path) -> list[Path]:
    """Paths of the GGUF files that were converted to 8 bits, which takes seconds: as if."""
    results: list[Path] = []

    def convert_gguf(path: Path, work: Path, progress: object) -> object:
        results.append(path)
        for result in exported.iterdir():
            if result.suffix in (".xml", ".bin"):
                shutil.copy(result, work)
        return prepare.write_derived(path, prepare.read(path, prepare.QUIET).fields, work)

    monkeypatch.setattr(prepare, "convert_gguf", convert_gguf)
    return results


@pytest.fixture
def fake(fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path) -> FakeHub:
    """A hub with the tiny model, which has the short name `tiny`."""
    fake.repositories[NAME] = FakeRepository({F16: tiny_gguf.read_bytes()})
    model = KnownModel("Tiny", NAME, F16, 1000, "cc0-1.0")
    monkeypatch.setattr(names, "known_models", lambda: {"tiny": model})
    return fake


def in_ollama(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    content, folder = tiny_gguf.read_bytes(), tmp_path / "ollama"
    digest = hashlib.sha256(content).hexdigest()
    manifest = folder / "manifests/registry.ollama.ai/library/tiny/1b"
    layer = {"mediaType": "application/vnd.ollama.image.model", "size": len(content)}
    for path, text in (
        (folder / f"blobs/sha256-{digest}", content),
        (manifest, json.dumps({"layers": [{**layer, "digest": f"sha256:{digest}"}]}).encode()),
    ):
        path.parent.mkdir(parents=True)
        path.write_bytes(text)
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    return "ollama/tiny:1b"


def in_lm_studio(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "lmstudio" / "owner" / "tiny" / F16
    path.parent.mkdir(parents=True)
    shutil.copy(tiny_gguf, path)
    monkeypatch.setattr(other_apps, "_LM_STUDIO_FOLDERS", (str(tmp_path / "lmstudio"),))
    return f"lmstudio/owner/tiny/{F16}"


def a_path(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(tiny_gguf)


def hub_name(name: str) -> Callable[..., str]:
    return lambda *_: name


WAYS = [in_ollama, in_lm_studio, a_path, *map(hub_name, ("tiny", NAME, f"{NAME}:f16"))]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("way", WAYS)
def test_a_gguf_model_by_any_name_gets_8_bits(
    way: Callable[..., str],
    tmp_path: Path,
    tiny_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    converted: list[Path],
):
    name, cache = way(tmp_path, tiny_gguf, monkeypatch), tmp_path / "cache"
    files = resolve(f"{name}@int8", cache)
    assert files.name == f"{name}@int8"
    assert files.weights is None, "it does not run from the file"
    assert len(converted) == 1
    assert resolve(name, cache, weights="int8") == files
    assert len(converted) == 1, "once"
    assert resolve(name, cache).weights is not None
    for form in ("int4", "f16"):
        with raises(
            ModelNotFound, f"{name} has no form {form}; expected {name}@int8, or the name alone"
        ):
            resolve(name, cache, weights=form)


def test_shards_are_joined_before_they_are_converted(tmp_path: Path, converted: list[Path]):
    first = write_tiny(tmp_path / "m.gguf", split=8)
    assert resolve(f"{first}@int8", tmp_path / "cache").weights is None
    assert [path.name for path in converted] == [GGUF_WEIGHTS]


@pytest.mark.parametrize("weights", ["int8", "int4", "f16"])
def test_a_checkpoint_is_converted_to_the_weights_that_are_asked_for(
    weights: str, fake: FakeHub, tmp_path: Path
):
    folder, cache = write_checkpoint("qwen3", tmp_path / "checkpoint"), tmp_path / "cache"
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    fake.repositories["owner/both"] = FakeRepository({**content, "x-Q8_0.gguf": b"GGUF"})
    for name in (str(folder), "owner/both"):
        files = resolve(name, cache, weights=weights)
        assert files.folder.name.endswith(f"-{weights}")
        assert files.name == f"{name}@{weights}"
        assert resolve(name, cache).folder == files.folder, "it is found without its form as well"


def test_the_default_models_form_has_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(prepare, "from_wheel", lambda model, *_: model)
    for name in (DEFAULT_MODEL, f"{DEFAULT_MODEL}@int8"):
        assert pull(name, tmp_path).name == DEFAULT_MODEL
    with raises(ModelNotFound, "int4", f"{DEFAULT_MODEL}@int8"):
        pull(f"{DEFAULT_MODEL}@int4", tmp_path)


def test_an_openvino_model_has_no_other_form(exported: Path, tmp_path: Path):
    with raises(ModelNotFound, "int8"):
        resolve(f"{exported}@int8", tmp_path)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", ["x.gguf@int3", "tiny@q4", f"{NAME}@int3", f"{NAME}:f16@Q8"])
def test_a_form_that_is_none_is_refused_with_those_that_are(name: str, tmp_path: Path):
    with raises(ModelNotFound, "coreml, mlx, int8, int4, f16"):
        resolve(name, tmp_path)


@pytest.mark.parametrize(
    ("more", "values"),
    [
        ({"weights": "int3"}, ("'int3'", "int8, int4, f16")),
        ({"weights": "int4"}, ("int8", "int4")),
        ({"weights": "int8", "engine": "mlx"}, ("openvino", "mlx")),
        ({"engine": "coreml"}, ("openvino", "coreml")),
    ],
)
def test_weights_that_contradict_the_rest_are_refused(
    more: dict[str, str], values: tuple[str, ...], tiny_gguf: Path, tmp_path: Path
):
    with raises(InvalidRequest, *values):
        resolve(f"{tiny_gguf}@int8", tmp_path / "cache", **more)
    assert not (tmp_path / "cache").exists()


def test_a_model_is_loaded_with_weights(tiny_gguf: Path, cache: Path, converted: list[Path]):
    assert load(tiny_gguf, weights="int8").files.name == f"{tiny_gguf}@int8"
    with raises(PacelineError, "'q4'"):
        load(tiny_gguf, weights="q4")


# -- checkpoints that have changed -----------------------------------------------------------------


def made_at(files: ModelFiles) -> int:
    return files.path.stat().st_mtime_ns


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_checkpoint_that_changed_is_converted_again_when_it_is_used(
    weights: str, changed: str, tmp_path: Path
):
    folder, cache = write_checkpoint("qwen3", tmp_path / "checkpoint"), tmp_path / "cache"
    first = made_at(convert(str(folder), weights, cache))
    assert made_at(resolve(str(folder), cache)) == first
    os.utime(folder / changed, ns=(1, 1))
    again = resolve(str(folder), cache)
    assert again.folder.name.endswith(f"-{weights}"), "in the same form"
    assert made_at(again) > first
    assert made_at(resolve(str(folder), cache)) == made_at(again)
    assert len([*models_dir(cache).iterdir()]) == 1


def test_a_conversion_outlives_its_checkpoint(tmp_path: Path):
    folder, cache = write_checkpoint("qwen3", tmp_path / "checkpoint"), tmp_path / "cache"
    files = convert(str(folder), "int8", cache)
    shutil.rmtree(folder)
    assert resolve(str(folder), cache).folder == files.folder


def test_a_checkpoint_of_the_hub_that_changed_is_converted_again(fake: FakeHub, tmp_path: Path):
    folder, cache = write_checkpoint("qwen3", tmp_path / "checkpoint"), tmp_path / "cache"
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    fake.repositories["owner/other"] = FakeRepository(content)
    first = made_at(resolve("owner/other@int4", cache))
    assert made_at(resolve("owner/other", cache)) == first
    snapshot = checkpoints.cached("owner/other")
    assert snapshot is not None
    os.utime(snapshot / "config.json", ns=(1, 1))
    fake.asked.clear()
    assert made_at(resolve("owner/other", cache)) > first
    assert fake.asked == []
    assert [path.name[-5:] for path in models_dir(cache).iterdir()] == ["-int4"]
