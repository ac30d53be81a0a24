from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("coremltools")

import coremltools as ct  # noqa: E402
from rehearsal_modules import (  # noqa: E402
    COMPRESSIONS,
    ROWS,
    SLOTS,
    Block,
    Text,
    converted,
    saved,
    text,
    with_weights_of,
)

from paceline.errors import InvalidRequest  # noqa: E402
from paceline_coreml.rehearsal import RehearsalModel, RehearsalState  # noqa: E402
from paceline_coreml.rehearsal.program import read_package  # noqa: E402

pytestmark = [pytest.mark.coreml, pytest.mark.usefixtures("quiet_coremltools")]

BLOCKS = ([0], [1, 2], [3, 4, 5, 6], [7, 8, 9], [10])
"""Rows 0 to 10 of a text, in blocks of several sizes."""


@pytest.fixture(scope="module")
def model(block_model: Any) -> Any:
    """The block as coremltools converts it. Treat it as read-only."""
    return block_model


@pytest.fixture(scope="module")
def package(block_package: Path) -> Path:
    return block_package


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture(scope="module")
def functions(model: Any, folder: Path) -> Path:
    """Functions t1 to t4, each for so many rows, that share their weights."""
    path = folder / "functions.mlpackage"
    rows = {
        f"t{count}": {name: one.shape for name, one in text().block(range(count)).items()}
        for count in range(1, ROWS + 1)
    }
    ct.models.utils.materialize_dynamic_shape_mlmodel(model, rows, str(path))
    return path


def run(
    opened: Callable[[int], RehearsalModel],
    state: RehearsalState,
    blocks: Any = BLOCKS,
    words: Text | None = None,
) -> np.ndarray:
    """[D, rows] for all blocks, each by the model for its number of rows."""
    words = words or text()
    found = [opened(len(rows)).predict(words.block(rows), state)["out"] for rows in blocks]
    return np.concatenate(found, 2)[0, :, :, 0]


def reference(block: Block, blocks: Any = BLOCKS) -> tuple[np.ndarray, np.ndarray]:
    """What torch makes of the same rows: [D, rows], and the keys it wrote."""
    found = []
    with torch.no_grad():
        for rows in blocks:
            given = text().block(rows).values()
            found.append(block(*map(torch.from_numpy, given)).numpy())
    return np.concatenate(found, 2)[0, :, :, 0], block.k_state.numpy()


def close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())


def test_a_block_computes_what_torch_does(package: Path):
    model = RehearsalModel(package, rounding="f32")
    state = model.make_state()
    found = run(lambda _: model, state)
    expected, keys = reference(Block())
    assert close(found, expected, 3e-6)
    assert close(state.read_state("k_state"), keys, 3e-6)


def test_a_block_that_is_rounded_stays_near(package: Path):
    model = RehearsalModel(package)
    state = model.make_state()
    found = run(lambda _: model, state)
    expected, keys = reference(Block())
    assert close(found, expected, 3e-3)
    assert close(state.read_state("k_state"), keys, 3e-3)
    for numbers in (found, state.read_state("k_state")):
        np.testing.assert_array_equal(numbers, numbers.astype(np.float16))


def test_a_block_of_fp32_computes_what_torch_does(folder: Path):
    path = saved(converted(Block(), "fp32"), folder / "fp32.mlpackage")
    expected, _ = reference(Block())
    for rounding, tolerance in (("f32", 3e-6), ("f16", 2e-3)):  # states are fp16 all the same
        model = RehearsalModel(path, rounding=rounding)
        assert close(run(lambda _, m=model: m, model.make_state()), expected, tolerance)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_weights_are_what_coremltools_says_they_are(
    compression: str, compressed: Callable[[str], Any], folder: Path
):
    model = compressed(compression)
    path = saved(model, folder / f"{compression}.mlpackage")
    stored = {op.type for op in read_package(path).function().block.ops}
    assert any(name.startswith("constexpr_") for name in stored)
    rehearsed = RehearsalModel(path, rounding="f32")
    plain = ct.optimize.coreml.decompress_weights(model)
    expected, _ = reference(with_weights_of(plain))
    # coremltools rounds what it decompresses to fp16.
    assert close(run(lambda _: rehearsed, rehearsed.make_state()), expected, 1e-3)

    decompressed = RehearsalModel(saved(plain, folder / "plain.mlpackage"))
    rounded = RehearsalModel(path)
    np.testing.assert_array_equal(
        run(lambda _: rounded, rounded.make_state()),
        run(lambda _: decompressed, decompressed.make_state()),
    )


@pytest.mark.parametrize("rounding", ["f16", "f32"])
def test_functions_of_a_package_share_a_state(functions: Path, package: Path, rounding: str):
    models = {
        count: RehearsalModel(functions, function_name=f"t{count}", rounding=rounding)
        for count in range(1, ROWS + 1)
    }
    flexible = RehearsalModel(package, rounding=rounding)
    state, other = models[1].make_state(), flexible.make_state()
    np.testing.assert_array_equal(run(models.__getitem__, state), run(lambda _: flexible, other))
    np.testing.assert_array_equal(state.read_state("v_state"), other.read_state("v_state"))
    with pytest.raises(InvalidRequest, match="another model"):
        flexible.predict(text().block([0]), state)


def test_a_function_of_n_rows_rejects_another_number(functions: Path):
    model = RehearsalModel(functions, function_name="t2")
    assert all(one.is_static for one in model.function.inputs)
    with pytest.raises(InvalidRequest, match=r"hidden has shape \[1, 64, 1, 1\], expected \[1, 64"):
        model.predict(text().block([0]), model.make_state())


# --- rows


@pytest.mark.parametrize("rounding", ["f16", "f32", "engine"])
def test_a_row_is_bitwise_the_same_in_every_block(package: Path, rounding: str):
    model = RehearsalModel(package, rounding=rounding)

    def made(blocks: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        state = model.make_state()
        out = run(lambda _: model, state, blocks)
        return out, state.read_state("k_state"), state.read_state("v_state")

    alone = made([[row] for row in range(SLOTS)])
    for size in range(2, ROWS + 1):
        for first in range(size):  # so that every row stands everywhere in a block
            edges = [0, *range(first or size, SLOTS, size), SLOTS]
            blocks = [range(start, stop) for start, stop in pairwise(edges)]
            for one, other in zip(made(blocks), alone, strict=True):
                np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("rounding", ["f16", "f32", "engine"])
def test_rows_that_mean_nothing_change_nothing(package: Path, rounding: str):
    model = RehearsalModel(package, rounding=rounding)
    plain, padded = model.make_state(), model.make_state()
    for rows in BLOCKS:
        expected = model.predict(text().block(rows), plain)["out"]
        given = text().block(rows, padding=ROWS - len(rows))
        found = model.predict(given, padded)["out"][:, :, : len(rows)]
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(padded.read_state("k_state"), plain.read_state("k_state"))


def test_slots_that_are_overwritten_leave_nothing(package: Path):
    model = RehearsalModel(package)
    used, fresh = model.make_state(), model.make_state()
    run(lambda _: model, used, words=text(seed=1))
    np.testing.assert_array_equal(run(lambda _: model, used), run(lambda _: model, fresh))
