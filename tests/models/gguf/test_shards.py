"""Models in several files, which must be complete and match."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.installed import check_models, list_models
from paceline.storage.gguf_file import read_gguf
from support.errors import raises
from support.tiny import gguf_writer, write_tiny

COUNT = 3


def write_shard(path: Path, number: int, count: int = COUNT, tensors: int = 6) -> Path:
    """Write a file of two tensors with its shard number."""
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


def test_missing_shards_are_a_single_error(shards: list[Path], tmp_path: Path):
    shards[1].unlink()
    with raises(ModelError, shards[1].name):
        resolve(str(shards[0]), tmp_path / "cache")
    shards[0].unlink()
    with raises(ModelError, shards[0].name, shards[1].name):
        resolve(str(shards[2]), tmp_path / "cache")


def test_mismatched_shards_are_rejected_by_name(shards: list[Path]):
    def refused(*names: object) -> None:
        with raises(ModelError, *names):
            read_gguf(shards[0])

    shutil.copy(shards[1], shards[2])
    refused(shards[2], "split.no")
    write_shard(shards[2], 2, count=4)
    refused(shards[2], "split.count")
    write_shard(shards[2], 2)
    write_shard(shards[0], 0, tensors=7)
    refused("6 tensors")
    shards[1].write_bytes(shards[1].read_bytes()[:-99])
    refused(shards[1])


def test_a_whole_file_with_a_shard_name_is_rejected_unless_it_is_the_only_one(
    tmp_path: Path, tiny_gguf: Path
):
    shutil.copy(write_shard(tmp_path / "part", 0), tmp_path / "renamed.gguf")
    with raises(ModelError, "split.count"):
        resolve(str(tmp_path / "renamed.gguf"), tmp_path / "a")
    for name in ("m-00001-of-00001.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        shutil.copy(tiny_gguf, tmp_path / name)
    assert resolve(str(tmp_path / "m-00001-of-00001.gguf"), tmp_path / "a").context_length == 512
    with raises(ModelError, "split.no"):
        resolve(str(tmp_path / "m-00001-of-00002.gguf"), tmp_path / "b")
    assert not any((tmp_path / "b" / "models").iterdir()), "nothing is half-made"


def test_a_split_model_runs_like_the_whole_one(tmp_path: Path):
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
    assert files.weights_bytes > files.path.stat().st_size
    rows = [engine.step([(engine.open(), Block([1, 2, 3], 3))]).logits[0] for engine in engines]
    assert np.array_equal(*rows)
    assert str(first) in {model.name for model in list_models(cache)}
    assert check_models(cache) == 2


def test_a_changed_shard_makes_a_different_model(tmp_path: Path):
    first = write_tiny(tmp_path / "m.gguf", split=8)
    files = resolve(str(first), tmp_path / "cache")
    second = next(tmp_path.glob("m-00002-of-*.gguf"))
    os.utime(second, ns=(1, 1))
    assert resolve(str(first), tmp_path / "cache").fingerprint != files.fingerprint
    second.write_bytes(second.read_bytes()[:-99])
    with raises(ModelError, second):
        resolve(str(first), tmp_path / "cache")
