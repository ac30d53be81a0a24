"""The manifest of a Core ML model: whole, or refused with every fault named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline_coreml.engine.artifact import Shard, read_artifact
from support.coreml import written_artifact
from support.errors import raises

Change = Callable[[dict[str, Any]], object]

LAYERS = ["layers-000-002.mlpackage", "layers-002-003.mlpackage"]
HEADS = ["head-000000-000100.mlpackage", "head-000100-000160.mlpackage"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written_artifact(tmp_path / "artifact")


def changed(folder: Path, change: Change) -> str:
    """What is said of the artifact when its manifest was changed."""
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(ModelError) as raised:
        read_artifact(folder)
    return str(raised.value)


def test_a_complete_artifact_is_read(folder: Path):
    found = read_artifact(folder)
    assert found.layer_shards == (Shard(LAYERS[0], 0, 2, (1,)), Shard(LAYERS[1], 2, 3))
    assert [(shard.start, shard.end) for shard in found.head_shards] == [(0, 100), (100, 160)]
    assert (found.taps, found.rows, found.slots) == ((1,), 4, 64)


@pytest.mark.parametrize(
    ("rows", "functions", "decode_rows", "names"),
    [
        (4, [], 4, {None}),
        (128, [], 8, {None}),
        (64, [8, 64], 8, {"t8", "t64"}),
        (64, [1, 4, 64], 4, {"t1", "t4", "t64"}),
        (64, [16, 64], 16, {"t16", "t64"}),
    ],
)
def test_decoding_uses_the_functions_with_few_rows(
    folder: Path, rows: int, functions: list[int], decode_rows: int, names: set[str | None]
):
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "rows": rows, "functions": functions}))
    artifact = read_artifact(folder)
    assert artifact.decode_rows == decode_rows
    assert {artifact.function(width) for width in artifact.widths} == names


def put(*keys: Any, value: Any) -> Change:
    def change(found: dict[str, Any]) -> None:
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("version", value=2), "expected coreml-model and version 1"),
        (put("functions", value=[2]), "functions is [2], expected one for 4 rows"),
        (put("lags", value=2), "ring is 0, expected at least 6"),
        (
            lambda value: value["layer_shards"].pop(0),
            "layers-002-003.mlpackage has layers 2 to 2, expected a range from 0",
        ),
        (lambda value: value["layer_shards"].pop(), "the last shard ends at layer 2, expected 3"),
        (
            put("layer_shards", 1, "start", value=1),
            "layers-002-003.mlpackage has layers 1 to 2, expected a range from 2",
        ),
        (
            put("head_shards", 1, "start", value=110),
            "head-000100-000160.mlpackage has tokens 110 to 159, expected a range from 100",
        ),
        (put("layer_shards", 0, "taps", value=[2]), "has taps [2], expected layers"),
        (put("files", value={}), "the files of layers-000-002.mlpackage are not listed"),
        (put("files", "embeddings.npy", "bytes", value=1), "embeddings.npy has"),
        (
            put("files", "rotary.npy", "sha256", value="0" * 64),
            "rotary.npy has changed: SHA-256 is",
        ),
        (
            lambda value: value["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}),
            "'../x', expected a file in this folder",
        ),
    ],
)
def test_an_invalid_artifact_is_reported(folder: Path, change: Change, said: str):
    assert said in changed(folder, change)


def test_all_contradictions_are_reported_together(folder: Path):
    def change(value: dict[str, Any]) -> None:
        value["layer_shards"].pop()
        value["head_shards"][1]["start"] = 90

    message = changed(folder, change)
    for part in ("ends at layer 2", "has tokens 90 to 159"):
        assert part in message


def test_a_flipped_bit_or_a_missing_package_is_reported(folder: Path):
    path = folder / HEADS[0] / "Manifest.json"
    path.write_bytes(path.read_bytes().replace(b"of", b"og"))
    with raises(ModelError, "head-000000-000100.mlpackage/Manifest.json has changed"):
        read_artifact(folder)
    path.unlink()
    with raises(ModelError, "head-000000-000100.mlpackage/Manifest.json is missing"):
        read_artifact(folder)
