"""States and outputs of a rehearsed model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("coremltools")

from rehearsal_modules import SLOTS, text  # noqa: E402

from paceline.errors import InvalidRequest  # noqa: E402
from paceline_coreml.rehearsal import RehearsalModel  # noqa: E402

pytestmark = [pytest.mark.coreml, pytest.mark.usefixtures("quiet_coremltools")]


@pytest.fixture(scope="module")
def model(block_package: Path) -> RehearsalModel:
    return RehearsalModel(block_package)


# --- reading


def test_numbers_of_any_float_type_are_taken_as_they_are(model: RehearsalModel):
    given = text().block([0])
    expected = model.predict(given, model.make_state())["out"]
    for dtype in (np.float16, np.float64):
        other = {name: numbers.astype(dtype) for name, numbers in given.items()}
        found = model.predict(other, model.make_state())["out"]
        np.testing.assert_array_equal(found, expected)
        assert all(numbers.dtype == dtype for numbers in other.values()), "the caller's stay"


def test_outputs_are_the_callers_own(save_program: Callable[..., Path]):
    path = save_program(
        lambda mb, x, i: [mb.identity(x=x), mb.add(x=i, y=np.int32(1))],
        {"x": np.zeros((2, 3), np.float32), "i": np.zeros(2, np.int32)},
    )
    model = RehearsalModel(path)
    given = {"x": np.ones((2, 3), np.float32), "i": np.array([1, 2])}
    first, second = model.predict(given).values()
    assert (first.dtype, second.dtype) == (np.float32, np.int32)
    assert second.tolist() == [2, 3]
    first[:] = 7
    assert given["x"].max() == 1
    with pytest.raises(InvalidRequest, match="i is float32"):
        model.predict({**given, "i": np.ones(2, np.float32)})


def test_a_model_that_keeps_nothing_has_an_empty_state(save_program: Callable[..., Path]):
    given = {"x": np.ones((2, 3), np.float32)}
    model = RehearsalModel(save_program(lambda mb, x: mb.exp(x=x), given))
    state = model.make_state()
    assert state.cells == {}
    np.testing.assert_array_equal(
        *(
            one
            for found in (model.predict(given), model.predict(given, state))
            for one in found.values()
        )
    )


def test_a_model_that_keeps_something_needs_its_own_state(
    model: RehearsalModel, save_program: Callable[..., Path]
):
    with pytest.raises(InvalidRequest, match=r"keeps k_state, v_state; pass a state from make_st"):
        model.predict(text().block([0]))
    given = {"x": np.ones((2, 3), np.float32)}
    other = RehearsalModel(save_program(lambda mb, x: mb.exp(x=x), given))
    with pytest.raises(InvalidRequest, match="another model"):
        model.predict(text().block([0]), other.make_state())
    with pytest.raises(InvalidRequest, match="another model"):
        other.predict(given, model.make_state())


def test_a_state_is_read_and_written_as_coremltools_does(model: RehearsalModel):
    state = model.make_state()
    shape = (1, 2, SLOTS, 16)
    numbers = np.random.default_rng(0).normal(size=shape)
    state.write_state("k_state", numbers)
    found = state.read_state("k_state")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, numbers.astype(np.float16))
    found[:] = 0
    assert state.read_state("k_state").any(), "what is read is a copy"
    assert not state.read_state("v_state").any()
    with pytest.raises(InvalidRequest, match="float16"):
        state.write_state("k_state", numbers.astype(np.float16))
    with pytest.raises(InvalidRequest, match=r"has shape \[1, 2, 24, 16\], got \[2, 24, 16\]"):
        state.write_state("k_state", numbers[0])
    with pytest.raises(InvalidRequest, match="'keys'"):
        state.read_state("keys")


def test_a_state_that_is_put_back_continues_where_it_was(model: RehearsalModel):
    first, second = model.make_state(), model.make_state()
    model.predict(text().block([0, 1, 2]), first)
    for name in ("k_state", "v_state"):
        second.write_state(name, first.read_state(name))
    np.testing.assert_array_equal(
        model.predict(text().block([3]), second)["out"],
        model.predict(text().block([3]), first)["out"],
    )
