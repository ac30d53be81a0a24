"""Converted shards of every family: what they compute, and that they break no failing rule."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline_coreml.conversion.compress import compress
from paceline_coreml.conversion.shards import (
    ShardSizes,
    convert_head,
    convert_layers,
    input_shapes,
    static_functions,
)
from paceline_coreml.conversion.torch_model import run_layers
from paceline_coreml.engine.inputs import CallInputs
from paceline_coreml.lint import lint
from paceline_coreml.rehearsal import RehearsalModel
from support.coreml_families import CAUSAL, ONE_PER_FAMILY, ROWS, SLOTS, TinyModel

pytestmark = pytest.mark.coreml

SIZES = ShardSizes(rows=ROWS, slots=SLOTS, conv_slots=ROWS + 2)
WIDER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "router_hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
}
"""Wide enough that every form of compression applies to the weights."""
FEWER: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2 with experts": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}
"""Families whose layers are not all alike -> each kind once; of the others there are two."""


@pytest.fixture(scope="module", params=ONE_PER_FAMILY)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    sizes = {**WIDER, "num_hidden_layers": 2, **FEWER.get(request.param, {})}
    return TinyModel(request.param, tmp_path_factory.mktemp("checkpoint"), **sizes).family()


@pytest.fixture(scope="module")
def packages(family: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All layers and the head as ML programs, uncompressed."""
    size = family.shape.vocab_size if family.head() is not None else len(family.shape.labels)
    return {
        "layers": convert_layers(family, 0, family.shape.layers, sizes=SIZES),
        "head": convert_head(family, 0, size, sizes=SIZES),
    }


def broken(path: Path) -> list[str]:
    """Findings that fail, and those about rows that could not be tracked."""
    return [
        f"{one.rule} {one.where}: {one.what}"
        for one in lint(path)
        if one.verdict == "fail" or one.rule in ("row-order-unknown", "cast", "unknown-operation")
    ]


@pytest.mark.pairs
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("part", ["layers", "head"])
def test_a_converted_shard_passes_all_required_rules(
    packages: dict[str, Any], part: str, form: str, tmp_path: Path
):
    compress(packages[part], form).save(str(tmp_path / "model.mlpackage"))
    assert broken(tmp_path / "model.mlpackage") == []


@pytest.mark.parametrize(
    "family", ["lfm2", "privacy filter"], indirect=True, scope="module"
)  # these have every kind of input
def test_static_functions_pass_all_required_rules(
    family: Any, packages: dict[str, Any], tmp_path: Path
):
    packages["layers"].save(str(tmp_path / "flexible.mlpackage"))
    shapes = {rows: input_shapes(family, SIZES, rows) for rows in (1, 4)}
    static_functions(tmp_path / "flexible.mlpackage", shapes, tmp_path / "static.mlpackage")
    assert broken(tmp_path / "static.mlpackage") == []


@pytest.mark.parametrize(
    "family", [form for form in ONE_PER_FAMILY if form in CAUSAL], indirect=True, scope="module"
)
def test_emulated_layers_match_torch(family: Any, packages: dict[str, Any], tmp_path: Path):
    packages["layers"].save(str(tmp_path / "layers.mlpackage"))
    model = RehearsalModel(tmp_path / "layers.mlpackage", rounding="f32")
    shape, state = family.shape, model.make_state()
    stream = np.zeros((11, shape.stream_size), np.float32)
    stream[:, : shape.hidden_size] = np.random.default_rng(0).normal(size=(11, shape.hidden_size))
    lags, slots = shape.lags, SIZES.conv_slots
    expected = run_layers(family, range(shape.layers), stream, conv_slots=slots, rows=ROWS)
    inputs = CallInputs(ROWS, *family.rope_tables(), conv_slots=slots if lags else 0, lags=lags)
    for start in range(0, len(stream), ROWS):
        rows = stream[start : start + ROWS]
        block = np.zeros((1, shape.stream_size, ROWS, 1), np.float32)
        block[0, :, : len(rows), 0] = rows.T
        given = {"hidden": block, **inputs.for_rows(start, len(rows))}
        found = model.predict(given, state)["out_hidden"][0, :, : len(rows), 0].T
        worst = np.abs(found - expected[start : start + ROWS]).max()
        assert worst <= 1e-3 * np.abs(expected).max()
