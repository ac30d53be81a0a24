"""A model in several files: all of them are there, and belong together."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.gguf.shards import check_shards, first_shard
from paceline.models.installed import check_models, list_models
from support.errors import raises
from support.tiny import gguf_writer, write_tiny

COUNT = 3


def write_shard(path: Path, number: int, count: int = COUNT, tensors: int = 6) -> Path:
    """A file of two tensors that says which part it is."""
    with gguf_writer(path, "llama", {}) as writer:
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", tensors)
        for name in ("a", "b"):
            writer.add_tensor(f"{name}.{number}.weight", np.zeros((2, 32), np.float32))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    names = [tmp_path / f"m-Q8_0-0000{number}-of-0000{COUNT}.gguf" for number in (1, 2, 3)]
    return [write_shard(path, number) for number, path in enumerate(names)]


def test_any_shard_stands_for_the_model(shards: list[Path]):
    for path in shards:
        assert first_shard(path) == shards[0]


def test_a_whole_file_is_its_own_model(tmp_path: Path):
    assert first_shard(tmp_path / "m.gguf") == tmp_path / "m.gguf"


def test_missing_shards_are_one_clear_error(shards: list[Path], tmp_path: Path):
    shards[1].unlink()
    with raises(ModelError, shards[1].name):
        resolve(str(shards[0]), tmp_path / "cache")
    shards[0].unlink()
    with raises(ModelError, shards[0].name, shards[1].name):
        resolve(str(shards[2]), tmp_path / "cache")


def test_a_shard_of_another_place_is_refused_by_name(shards: list[Path]):
    shutil.copy(shards[1], shards[2])
    with raises(ModelError, shards[2], "split.no"):
        check_shards(shards)


def test_a_shard_of_another_model_is_refused(shards: list[Path]):
    write_shard(shards[2], 2, count=4)
    with raises(ModelError, "split.count"):
        check_shards(shards)
    write_shard(shards[2], 2, tensors=6)
    write_shard(shards[0], 0, tensors=7)
    with raises(ModelError, "6 tensors"):
        check_shards(shards)


def test_a_shard_that_is_cut_off_is_refused_by_name(shards: list[Path]):
    shards[1].write_bytes(shards[1].read_bytes()[:-99])
    with raises(ModelError, shards[1]):
        check_shards(shards)


def test_a_whole_file_with_the_name_of_a_shard_is_refused_unless_it_is_the_only_one(
    tmp_path: Path, tiny_gguf: Path
):
    for name in ("m-00001-of-00001.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        shutil.copy(tiny_gguf, tmp_path / name)
    assert first_shard(tmp_path / "m-00001-of-00001.gguf").is_file()
    with raises(ModelError, "split.no"):
        resolve(str(tmp_path / "m-00001-of-00002.gguf"), tmp_path / "cache")
    assert not any((tmp_path / "cache" / "models").iterdir()), "nothing is half-made"


def test_a_split_model_is_joined_once_and_runs_as_the_whole_one(tmp_path: Path):
    whole = write_tiny(tmp_path / "whole.gguf")
    first = write_tiny(tmp_path / "m.gguf", split=8)
    cache = tmp_path / "cache"
    files = resolve(str(first), cache)
    again = resolve(str(next(tmp_path.glob("m-00002-of-*.gguf"))), cache)
    assert again == files
    engines = [
        open_engine("llamacpp", item.path, item.context_length, EngineSettings())
        for item in (files, resolve(str(whole), cache))
    ]
    rows = [engine.step([(engine.open(), Block([1, 2, 3], 3))]).logits[0] for engine in engines]
    assert np.array_equal(*rows)
    assert str(first) in {model.name for model in list_models(cache)}
    assert check_models(cache) == 2


def test_shards_are_checked_again_only_when_one_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, checked = write_tiny(tmp_path / "m.gguf", split=8), list[int]()

    def check(paths: Sequence[Path]) -> None:
        checked.append(len(paths))
        check_shards(paths)

    monkeypatch.setattr("paceline.models.prepare.check_shards", check)
    files = [resolve(str(first), tmp_path / "cache") for _ in range(3)]
    assert len(checked) == 1
    second = next(tmp_path.glob("m-00002-of-*.gguf"))
    os.utime(second, ns=(1, 1))
    assert resolve(str(first), tmp_path / "cache").fingerprint == files[0].fingerprint
    assert len(checked) == 2
    second.write_bytes(second.read_bytes()[:-99])
    with raises(ModelError, second):
        resolve(str(first), tmp_path / "cache")
