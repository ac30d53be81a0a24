"""Hugging Face checkpoints without conversion."""

import codecs
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import ModelError, ModelNotFound
from paceline.models import ModelFiles, checkpoints, pull, resolve
from paceline.models.files import open_checkpoint
from support.checkpoints import write_checkpoint
from support.errors import raises
from support.fake_hub import FakeHub, FakeRepository


@pytest.fixture
def folder(tmp_path: Path, tiny_files: ModelFiles) -> Path:
    """A checkpoint with the tiny model's vocabulary and unused weights."""
    return write_checkpoint(tmp_path / "checkpoint", tiny_files)


@pytest.mark.parametrize(
    ("system", "machine", "installed", "expected"),
    [
        ("darwin", "arm64", True, True),
        ("darwin", "arm64", False, False),
        ("darwin", "x86_64", True, False),
        ("linux", "arm64", True, False),
    ],
)
def test_checkpoints_run_without_conversion_on_apple_silicon_with_mlx_lm(
    system: str, machine: str, installed: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if installed else None)
    assert checkpoints.mlx_available() is expected


def test_a_checkpoint_is_opened_in_place(folder: Path, tmp_path: Path):
    files = resolve(f"{folder}@mlx", tmp_path / "cache")
    assert (files.engine, files.path) == ("mlx", folder)
    assert files.context_length > 0
    assert files.tokenizer.encode("and then")
    assert files.template.render([{"role": "user", "content": "Hi"}])
    assert open_checkpoint(folder, "x").fingerprint == files.fingerprint
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert open_checkpoint(folder, "x").fingerprint != files.fingerprint


def test_a_git_lfs_pointer_and_a_byte_order_mark_are_recognized(folder: Path):
    for path in (folder / "config.json", folder / "tokenizer.json", *folder.glob("*.safetensors")):
        content = path.read_bytes()
        if path.suffix == ".json":
            path.write_bytes(codecs.BOM_UTF8 + content)
            assert open_checkpoint(folder, "m").tokenizer.encode("and")
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n")
        with raises(ModelError, f"{path} is a Git LFS pointer", "git lfs pull"):
            open_checkpoint(folder, "m").tokenizer.encode("and")
        path.write_bytes(content)


def index(folder: Path, value: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (lambda f: index(f, {"weight_map": {"a": "model-2.safetensors"}}), "model-2.safetensors"),
        (lambda f: index(f, {"weight_map": {"a": 1}}), "weight files"),
    ],
)
def test_a_checkpoints_missing_files_are_named(
    folder: Path, spoil: Callable[[Path], object], name: str
):
    spoil(folder)
    with raises(ModelError, name):
        open_checkpoint(folder, "x")


# -- from the hub ----------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_hugging_face_checkpoint_is_downloaded_once_or_if_a_part_is_missing(
    folder: Path, tmp_path: Path, fake: FakeHub
):
    fake.repositories["some/model"] = FakeRepository(content(folder))
    for _ in range(2):
        files = resolve("some/model@mlx", tmp_path / "cache")
        assert files.engine == "mlx"
        assert len(fake.downloads()) == 1
    (files.folder / "model.safetensors").unlink()
    assert (resolve("some/model@mlx", tmp_path / "cache").folder / "model.safetensors").is_file()


@pytest.mark.parametrize("get", [resolve, pull])
def test_folders_and_hub_names_may_mean_a_checkpoint_if_it_can_run(
    get: Callable[..., ModelFiles],
    folder: Path,
    tmp_path: Path,
    fake: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(checkpoints, "mlx_available", lambda: True)
    fake.repositories["some/model"] = FakeRepository(content(folder))
    for name in (str(folder), "some/model", "some/model"):
        assert get(name, tmp_path / "cache").engine == "mlx"
    with raises(ModelNotFound, "no/model"):
        get("no/model", tmp_path / "cache")
