"""A converted layer in the rehearsal: its numbers, its rows, its functions and its states."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from rehearsal_layer import ROWS, SLOTS, STATES, call, hidden

from paceline.errors import InvalidRequest
from paceline_coreml.conversion.compress import compress
from paceline_coreml.conversion.torch_model import run_layers
from paceline_coreml.rehearsal import RehearsalModel, RehearsalState
from paceline_coreml.rehearsal.program import read_package
from support import mil

pytestmark = [pytest.mark.coreml, pytest.mark.usefixtures("quiet_coremltools")]

BLOCKS = ([0], [1, 2], [3, 4, 5, 6], [7, 8, 9], [10])
"""Rows 0 to 10 of a text, in blocks of several sizes."""


def run(model: RehearsalModel, state: RehearsalState, blocks: Any = BLOCKS) -> np.ndarray:
    """[rows, D] of all blocks."""
    found = [model.predict(call(rows), state)["out_hidden"] for rows in blocks]
    return np.concatenate(found, 2)[0, :, :, 0].T


@pytest.mark.parametrize(("rounding", "tolerance"), [("f32", 1e-5), ("f16", 1e-2)])
def test_an_emulated_layer_matches_torch(
    layer_family: Any, layer_package: Path, rounding: str, tolerance: float
):
    model = RehearsalModel(layer_package, rounding=rounding)
    state = model.make_state()
    found = run(model, state)
    expected = run_layers(layer_family, range(1), hidden()[:11], conv_slots=ROWS, rows=ROWS)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    if rounding == "f16":
        for numbers in (found, state.cells[STATES[0]].array):
            np.testing.assert_array_equal(numbers, numbers.astype(np.float16))


@pytest.mark.parametrize("form", ["int8", "int8-per-tensor", "int4"])
def test_compressed_weights_match_coremltools(form: str, layer_model: Any, tmp_path: Path):
    model = compress(layer_model, form)
    model.save(str(tmp_path / "small.mlpackage"))
    plain = ct.optimize.coreml.decompress_weights(model)
    plain.save(str(tmp_path / "plain.mlpackage"))
    small, whole = (RehearsalModel(tmp_path / f"{name}.mlpackage") for name in ("small", "plain"))
    stored = {op.type for op in read_package(tmp_path / "small.mlpackage").function().block.ops}
    assert any(name.startswith("constexpr_") for name in stored)
    np.testing.assert_array_equal(run(small, small.make_state()), run(whole, whole.make_state()))


@pytest.mark.parametrize("rounding", ["f16", "engine"])
def test_a_row_is_bit_identical_in_every_block(layer_package: Path, rounding: str):
    model = RehearsalModel(layer_package, rounding=rounding)

    def made(blocks: Any) -> list[np.ndarray]:
        state = model.make_state()
        return [run(model, state, blocks), *(state.cells[name].array for name in STATES)]

    alone = made([[row] for row in range(SLOTS)])
    for size in range(2, ROWS + 1):
        for first in range(size):  # so that every row stands everywhere in a block
            edges = [0, *range(first or size, SLOTS, size), SLOTS]
            blocks = [range(start, stop) for start, stop in pairwise(edges)]
            for one, other in zip(made(blocks), alone, strict=True):
                np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


# -- states and outputs ----------------------------------------------------------------------------


def test_outputs_are_owned_by_the_caller(save_program: Callable[..., Path]):
    path = save_program(
        lambda mb, x, i: [mb.identity(x=x), mb.add(x=i, y=np.int32(1))],
        {"x": np.zeros((2, 3), np.float32), "i": np.zeros(2, np.int32)},
    )
    model = RehearsalModel(path)
    given = {"x": np.ones((2, 3), np.float64), "i": np.array([1, 2])}
    first, second = model.predict(given).values()
    assert (first.dtype, second.dtype) == (np.float32, np.int32)
    assert second.tolist() == [2, 3]
    first[:] = 7
    assert given["x"].max() == 1
    with pytest.raises(InvalidRequest, match="i is float32"):
        model.predict({**given, "i": np.ones(2, np.float32)})


def test_a_stateful_model_needs_its_own_state(
    layer_package: Path, save_program: Callable[..., Path]
):
    model = RehearsalModel(layer_package)
    with pytest.raises(InvalidRequest, match=r"k_state, .*v_state; pass a state from make_st"):
        model.predict(call([0]))
    given = {"x": np.ones((2, 3), np.float32)}
    other = RehearsalModel(save_program(lambda mb, x: mb.exp(x=x), given))
    assert other.make_state().cells == {}
    with pytest.raises(InvalidRequest, match="another model"):
        model.predict(call([0]), other.make_state())


COUNT = 4096
"""Ones whose sum in float16 stops at 2048, unless groups of them are added first."""

Outputs = Callable[[str], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    x = np.linspace(-1, 12, 1041, dtype=np.float32).reshape(1, -1)
    terms = np.full((1, COUNT), 0.1, np.float32)
    inputs = {"x": x.astype(np.float16), "terms": terms.astype(np.float16)}

    def build(mb: Any, x: Any, terms: Any) -> list[Any]:
        ones = np.ones((COUNT, 1), np.float16)
        return [
            mb.silu(x=x, name="silu"),
            mb.mul(x=x, y=np.float16(1e-6), name="tiny"),
            mb.reduce_sum(x=terms, axes=[1], keep_dims=True, name="sum"),
            mb.matmul(x=terms, y=ones, name="product"),
        ]

    path = mil.save_program(tmp_path_factory.mktemp("numerics") / "model.mlpackage", build, inputs)
    return lambda rounding: RehearsalModel(path, rounding=rounding).predict(inputs)


def test_emulated_rounding_reproduces_reported_neural_engine_errors(outputs: Outputs):
    exact, half = outputs("f16"), outputs("engine")
    error = np.abs(half["silu"] - outputs("f32")["silu"])[0]
    assert 5e-4 < error[:160].max() < 1.3e-3, "off by a thousandth near zero"
    assert (error[-80:] < 5e-3).all(), "float16's own rounding of numbers up to 12"
    assert (exact["tiny"] != 0).any()
    assert (half["tiny"] == 0).all(), "subnormal numbers become zero"
    for name in ("sum", "product"):  # in float16
        assert float(half[name][0, 0]) != float(exact[name][0, 0])
        assert float(half[name][0, 0]) == pytest.approx(float(exact[name][0, 0]), rel=0.05)
