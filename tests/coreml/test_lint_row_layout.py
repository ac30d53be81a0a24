"""Where rows come to lie, held to numpy: every number is marked with its row and moved along."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_coreml.lint.row_layout import (
    ONE,
    ROWS,
    Axis,
    Layout,
    RowsMixed,
    Untracked,
    broadcast,
    check_contraction,
    check_normalized,
    reduce_axes,
    reshape,
    without_rows,
)
from support.marks import marked

T = 7
"""Rows; no other size in these tests is a multiple of it."""

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4)


def on_one_axis(marks: np.ndarray) -> bool:
    """Whether the row that a number belongs to depends on its place along a single axis."""
    return any(
        (
            marks
            == marks[tuple(slice(None) if n == axis else slice(0, 1) for n in range(marks.ndim))]
        ).all()
        for axis in range(marks.ndim)
    )


def split_of(numbers: int, draw: st.DataObject) -> list[int]:
    """Sizes whose product is `numbers`."""
    sizes = []
    while draw.draw(st.booleans()):
        size = draw.draw(st.sampled_from([n for n in range(1, numbers + 1) if numbers % n == 0]))
        sizes.append(size)
        numbers //= size
    return [*sizes, numbers]


@st.composite
def with_rows(draw: st.DrawFn) -> Layout:
    axes = [Axis(size) for size in draw(SIZES)]
    before, after = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3]))
    axes.insert(draw(st.integers(0, len(axes))), Axis(before, True, after))
    return Layout(tuple(axes))


@pytest.mark.parametrize("fixed", [False, True])
@given(layout=with_rows(), data=st.data())
def test_a_reshape_is_tracked_exactly_if_rows_stay_on_one_axis(
    fixed: bool, layout: Layout, data: st.DataObject
):
    marks = marked(layout, T)
    shape = split_of(marks.size, data)
    found = marks.reshape(shape)
    declared = [size if fixed or size % T else None for size in shape]
    try:
        made = reshape(layout, tuple(declared), T if fixed else None)
    except RowsMixed:
        assert not on_one_axis(found)
    else:
        np.testing.assert_array_equal(marked(made, T), found)


HEADS, DIM = Axis(4), Axis(16)


def of(*axes: Axis) -> Layout:
    return Layout(axes)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ((ONE, HEADS, ROWS, DIM), (1, 64, None, 1)),
        ((ONE, Axis(64), ROWS, ONE), (1, None, 4, 16)),
        ((ONE, Axis(64), ROWS, ONE), (1, 4, None, 16)),
        ((ONE, ROWS, HEADS, DIM), (1, 64, None, 1)),
    ],
    ids=["heads, tokens, dimensions", "tokens first", "tokens between", "tokens before channels"],
)
@pytest.mark.parametrize("rows", [None, 4])
def test_another_order_mixes_rows(
    axes: Sequence[Axis], shape: Sequence[int | None], rows: int | None
):
    layout = of(*axes)
    declared = tuple(rows if size is None else size for size in shape)
    try:
        made = reshape(layout, declared, rows)
    except RowsMixed as error:
        assert "no axis for the rows" in str(error)
    else:
        # With as many rows as there are heads, they may lie within another axis.
        assert not any(axis.rows_only for axis in made.axes)


def test_broadcasting_combines_a_row_with_itself_only():
    hidden = of(ONE, Axis(64), ROWS, ONE)
    assert broadcast([hidden, without_rows((1, 64, 1, 1))], None) == hidden
    assert broadcast([hidden, of(ROWS, ONE)], None) == hidden
    with pytest.raises(RowsMixed, match=r"combines \[1, 64, T, 1\] with \[4\*T, 1\]"):
        broadcast([hidden, of(Axis(4, True), ONE)], None)
    with pytest.raises(RowsMixed):
        broadcast([hidden, of(Axis(64, True, 1), ONE, ONE)], None)


def test_a_constant_may_have_an_element_per_row():
    hidden, table = of(ONE, Axis(64), ROWS, ONE), without_rows((1, 1, 4, 1), constant=True)
    for operands in ([hidden, table], [table, hidden]):
        assert broadcast(operands, 4) == hidden
        with pytest.raises(RowsMixed):
            broadcast(operands, 3)
    with pytest.raises(RowsMixed):
        broadcast([hidden, without_rows((1, 1, 4, 1))], 4)


def test_rows_contract_with_the_same_rows_only():
    check_contraction(ROWS, ROWS)
    check_contraction(DIM, DIM)
    for one, other in ((ROWS, DIM), (Axis(4, True), ROWS), (Axis(1, True, 4), Axis(4, True))):
        with pytest.raises(RowsMixed):
            check_contraction(one, other)
    with pytest.raises(Untracked):
        check_contraction(Axis(4, True), Axis(4, True))
    with pytest.raises(Untracked):
        check_contraction(ROWS, Axis(4), constant=True)


def test_a_value_of_all_rows_may_be_stored_but_not_broadcast_to_rows():
    mask, hidden = of(ONE, ONE, Axis(8), ROWS), of(ONE, Axis(8), ROWS, ONE)
    kept = reduce_axes(mask, [-1], keep=True)
    assert kept.axes == (ONE, ONE, Axis(8), ONE)
    assert kept.from_many_rows
    one = without_rows((), constant=True)
    assert broadcast([one, kept], None).from_many_rows
    assert not broadcast([kept, without_rows((1, 2, 8, 16))], None).from_many_rows
    mean = reduce_axes(hidden, [2], keep=True)
    with pytest.raises(RowsMixed, match="computed from several rows"):
        broadcast([hidden, mean], None)
    assert not reduce_axes(hidden, [1], keep=True).from_many_rows


def test_norms_run_over_channels_or_attended_rows():
    hidden = of(ONE, Axis(8), ROWS, ONE)
    assert check_normalized(hidden, [1]) == hidden
    scores = of(ONE, HEADS, ROWS, ROWS)
    assert check_normalized(scores, [-1]) == scores
    for axes in ([2], [1, 2]):
        with pytest.raises(RowsMixed, match="runs along the rows"):
            check_normalized(hidden, axes)
    with pytest.raises(RowsMixed, match="rows and channels together"):
        check_normalized(of(ONE, Axis(8, True)), [1])
