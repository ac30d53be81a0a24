"""A row's numbers, bit for bit, whatever stands beside it: operation by operation, numpy alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_coreml.rehearsal.ops import OPS
from paceline_coreml.rehearsal.ops.products import SHORT, dots
from paceline_coreml.rehearsal.ops.table import Cell
from paceline_coreml.rehearsal.rounding import to_half

Numbers = Callable[..., np.ndarray]
Made = Callable[[Numbers, int, int], dict[str, Any]]


class Rows(NamedTuple):
    """How an operation meets rows: its arguments for so many rows, of which these have rows."""

    op: str
    arguments: Made
    """From a source of numbers, the number of rows, and a width."""
    axes: dict[str, int]
    """Arguments that have rows, and along which axis; `out` is what comes out."""


def channels(op: str, **more: Any) -> Rows:
    """An operation on the layout of a model: [1, d, T, 1]."""
    return Rows(op, lambda make, t, d: {"x": make(1, d, t, 1), **more}, {"x": 2, "out": 2})


def with_columns(op: str, **more: Any) -> Rows:
    """An operation on scores: [1, 2, T, d]."""
    return Rows(op, lambda make, t, d: {"x": make(1, 2, t, d), **more}, {"x": 2, "out": 2})


def paired(op: str) -> Rows:
    """An operation on two values of a model's layout."""
    return Rows(
        op,
        lambda make, t, d: {"x": make(1, d, t, 1), "y": make(1, d, t, 1)},
        {"x": 2, "y": 2, "out": 2},
    )


ROWS = [
    *(channels(op) for op in ("exp", "sigmoid", "silu", "gelu", "rsqrt", "sign", "abs")),
    channels("clip", alpha=-0.5, beta=0.5),
    channels("cast", dtype="fp16"),
    *map(paired, ("add", "sub", "mul", "real_div", "maximum", "pow")),
    Rows(
        "mul", lambda make, t, d: {"x": make(1, d, t, 1), "y": make(1, d, 1, 1)}, {"x": 2, "out": 2}
    ),
    *(
        make(op, axes=axes, keep_dims=True)
        for op in ("reduce_sum", "reduce_mean", "reduce_max")
        for make, axes in ((channels, (1,)), (with_columns, (-1, 1)))
    ),
    with_columns("softmax"),
    channels("softmax", axis=1),
    Rows(
        "conv",
        lambda make, t, d: {"x": make(1, d, t, 1), "weight": make(7, d, 1, 1), "bias": make(7)},
        {"x": 2, "out": 2},
    ),
    Rows(
        "conv",
        lambda make, t, d: {"x": make(1, 2 * d, t, 1), "weight": make(6, d, 1, 1), "groups": 2},
        {"x": 2, "out": 2},
    ),
    Rows(
        "matmul",
        lambda make, t, d: {"x": make(1, 3, t, d), "y": make(1, 3, d, 11)},
        {"x": 2, "out": 2},
    ),
    Rows(
        "matmul",
        lambda make, t, d: {
            "x": make(1, 3, d, t),
            "y": make(1, 1, 11, d),
            "transpose_x": True,
            "transpose_y": True,
        },
        {"x": 3, "out": 2},
    ),
]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.op)
@settings(max_examples=12)
@given(
    rows=st.integers(2, 9), width=st.integers(1, 90), place=st.integers(0, 8), seed=st.integers(0)
)
def test_a_row_is_bit_identical_alone_and_in_a_block(
    case: Rows, rows: int, width: int, place: int, seed: int
):
    rng = np.random.default_rng(seed)

    def make(*shape: int) -> np.ndarray:
        found = rng.normal(size=shape).astype(np.float32)
        found[rng.random(shape) < 0.1] = rng.choice([0.0, -0.0])  # as masks leave them
        return found

    place %= rows
    run = OPS[case.op].run
    arguments = case.arguments(make, rows, width)
    alone = {
        name: np.take(value, [place], case.axes[name]) if name in case.axes else value
        for name, value in arguments.items()
    }
    with np.errstate(all="ignore"):
        expected = np.take(run(**arguments), [place], case.axes["out"])
        found = run(**alone)
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_every_computing_operation_is_tested():
    # What only moves numbers has nothing to get wrong, and constants have no rows.
    computing = {
        name for name, entry in OPS.items() if not entry.moves and not name.startswith("constexpr_")
    }
    assert computing == {case.op for case in ROWS}


SOME = np.array([[-3.0, -1.5, -0.5, 0.0], [0.5, 1.0, 2.5, 20.0]], np.float32)


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        ("cast", {"dtype": "fp16"}, SOME),
        ("expand_dims", {"axes": [0, -1]}, SOME[None, ..., None]),
        ("squeeze", {"axes": [-1]}, SOME),
        ("pow", {"y": np.float32(2)}, SOME**2),
        ("identity", {}, SOME),
    ],
)
def test_operations_unused_by_model_families_match_numpy(
    op: str, arguments: dict[str, Any], expected: np.ndarray
):
    """The others: tests/coreml/test_lint_families.py."""
    x = SOME[..., None] if op == "squeeze" else SOME
    found = OPS[op].run(x=x, **arguments)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@given(terms=st.integers(0, 3 * SHORT), seed=st.integers(0))
def test_dots_are_sums_of_products(terms: int, seed: int):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 1, 3, terms)), rng.normal(size=(4, 5, terms))
    found = dots(a.astype(np.float32), b.astype(np.float32))
    np.testing.assert_allclose(found, a @ b.swapaxes(-1, -2), rtol=1e-4, atol=1e-4)


def test_a_state_that_was_read_is_unaffected_by_a_write():
    cell = Cell(np.zeros(3, np.float32))
    read = OPS["read_state"].run(input=cell)
    OPS["write_state"].run(input=cell, data=np.ones(3, np.float32))
    assert read.tolist() == [0, 0, 0]
    assert cell.array.tolist() == [1, 1, 1]


# --- rounding


def bits(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers, np.float32).view(np.uint32)


def cast(numbers: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


def test_rounding_is_a_cast_to_fp16_for_every_number_between_two():
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    between = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32)
    for numbers in (
        halves,
        between,
        np.nextafter(between, np.float32(np.inf)),
        np.nextafter(between, np.float32(-np.inf)),
    ):
        np.testing.assert_array_equal(bits(to_half(numbers)), bits(cast(numbers)))


@given(st.lists(st.floats(width=32), max_size=8))
def test_rounding_is_a_cast_to_fp16_for_any_numbers(numbers: list[float]):
    given_numbers = np.array(numbers, np.float32)
    with np.errstate(all="ignore"):
        found = to_half(given_numbers)
    np.testing.assert_array_equal(found, cast(given_numbers))
    assert not np.shares_memory(found, given_numbers)
