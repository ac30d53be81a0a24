"""Conformance of DFlash networks: checkpoints that cannot be used are rejected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ModelError
from support.dflash import LEFT_OUT, config_json, write_checkpoint, write_config
from support.errors import raises
from support.networks import Case


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"hidden_size": 128}, ["its hidden size is 128, the target's 64"]),
        ({"num_target_layers": 30}, ["its number of target layers is 30, the target's 2"]),
        ({"vocab_size": 49152}, ["its vocabulary is 49152, the target's 320"]),
        (
            {"hidden_size": 576, "num_target_layers": 30, "vocab_size": 49152},
            ["hidden size is 576", "target layers is 30", "vocabulary is 49152"],
        ),
    ],
    ids=["width", "depth", "vocabulary", "all"],
)
def test_a_drafter_for_another_target_is_rejected_before_its_weights_are_read(
    case: Case, tmp_path: Path, changes: Any, faults: list[str]
):
    write_config(tmp_path, config_json(replace(case.config, **changes)))
    with raises(ModelError, "another target", *faults) as rejected:
        case.opened(tmp_path)
    assert str(rejected.value).count(", the target's") == len(faults)


@pytest.mark.parametrize(
    "tensors",
    [
        {"fc.weight": LEFT_OUT},
        {"norm.weight": np.full(64, np.nan, np.float32)},
        {"norm.weight": np.ones(3, np.float32)},
    ],
    ids=["missing", "not finite", "shape"],
)
def test_a_faulty_tensor_is_named(case: Case, tmp_path: Path, tensors: Any):
    write_checkpoint(tmp_path, case.config, tensors=tensors)
    with raises(ModelError, *tensors):
        case.opened(tmp_path)


@pytest.mark.parametrize("end", [0, 4, 100, -1])
def test_a_truncated_file_is_rejected(case: Case, tmp_path: Path, end: int):
    write_checkpoint(tmp_path, case.config)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    with raises(ModelError, "model.safetensors"):
        case.opened(tmp_path)
