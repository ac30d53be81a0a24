"""Packages whose states are inputs and outputs compute what packages with states do."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.app import main
from paceline.decoding.types import Block, tap_name
from paceline.engines import EngineSettings
from paceline_coreml.engine.artifact import read_artifact
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.rehearsal.program import read_package
from support.coreml import tiny_artifact
from support.coreml_checkpoints import zaya_artifact
from support.fake_mac import FakeMac, mac

__all__ = ["mac"]

pytestmark = pytest.mark.coreml

Twins = tuple[Path, Path]


@pytest.fixture(scope="module", params=[tiny_artifact, zaya_artifact], ids=["KV", "convolutions"])
def twins(request: pytest.FixtureRequest, core_ml: Callable[..., Path]) -> Twins:
    """An artifact with states, and one without."""
    stateful, stateless = (
        core_ml(
            request.param, functions=(4,), rows=4, taps=(0,), slots=64, head_rows=160, **options
        )
        for options in ({}, {"stateless": True})
    )
    return stateful, stateless


def outputs(folder: Path) -> list[np.ndarray]:
    """Logits and taps of blocks, of which the second has rejected rows."""
    engine = CoreMlEngine(folder, EngineSettings(taps=(0,)))
    rows: list[np.ndarray] = []
    with closing(engine.open()) as sequence:
        for tokens, kept in (([5, 9, 2, 41], 4), ([17, 3, 8], 1), ([4, 77], 2), ([12], 1)):
            result = engine.step([(sequence, Block(tokens, len(tokens)))])
            rows += [result.logits[0].copy(), result.taps[0][tap_name(0)].copy()]
            sequence.commit(kept)
    return rows


def test_a_stateless_model_gives_the_rows_of_a_stateful_one(twins: Twins):
    stateful, stateless = map(read_artifact, twins)
    for artifact, has_states in ((stateful, True), (stateless, False)):
        for shard in artifact.layer_shards:
            function = read_package(artifact.folder / shard.path).function()
            assert bool(function.states) == has_states
            assert bool(shard.states) != has_states
    for one, other in zip(*map(outputs, twins), strict=True):
        np.testing.assert_array_equal(one, other)


def test_sequences_have_separate_states(twins: Twins):
    engine = CoreMlEngine(twins[1])
    with closing(engine.open()) as first, closing(engine.open()) as second:
        alone = engine.step([(first, Block([5, 9], 2))]).logits[0].copy()
        first.commit(2)
        again = engine.step([(second, Block([5, 9], 2))]).logits[0]
        np.testing.assert_array_equal(alone, again)


def test_core_ml_accepts_its_own_output_states(twins: Twins, mac: FakeMac, monkeypatch: Any):
    with_core_ml = outputs(twins[1])
    for module in ("engine", "packages"):
        monkeypatch.setattr(f"paceline_coreml.engine.{module}.on_a_mac", lambda: False)
    for one, other in zip(with_core_ml, outputs(twins[1]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("other", [("--flexible",), ("--functions", "4,8"), ("--rows", "16")])
def test_stateless_conversion_rejects_several_row_counts(
    tiny_gguf: Path, other: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    command = ["convert", str(tiny_gguf), "--to", "coreml", "--stateless", "--quiet"]
    assert main([*command, "--slots", "64", *other]) == 2
    assert "stateless" in capsys.readouterr().err.strip().splitlines()[-1]
