"""Where rows come to lie, held to numpy: every number is marked with its row and moved along."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.tools.coreml.lint.layout import (
    ROWS,
    SINGLE,
    Axis,
    Layout,
    Mixed,
    Unfollowed,
    contracted,
    normed,
    plain,
    reduced,
    reshaped,
    together,
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
def test_a_shape_is_followed_where_rows_lie_on_one_axis_and_nowhere_else(
    fixed: bool, layout: Layout, data: st.DataObject
):
    marks = marked(layout, T)
    shape = split_of(marks.size, data)
    found = marks.reshape(shape)
    declared = [size if fixed or size % T else None for size in shape]
    try:
        made = reshaped(layout, tuple(declared), T if fixed else None)
    except Mixed:
        assert not on_one_axis(found)
    else:
        np.testing.assert_array_equal(marked(made, T), found)


@given(layout=with_rows(), data=st.data())
def test_what_is_put_together_again_is_as_it_was(layout: Layout, data: st.DataObject):
    assume(not any(axis.rows and not axis.alone for axis in layout.axes))
    declared = tuple(None if axis.rows else axis.before for axis in layout.axes)
    at = next(n for n, axis in enumerate(layout.axes) if axis.rows)
    low, high = data.draw(st.integers(0, at)), data.draw(st.integers(at, len(layout.axes)))
    joined = (*declared[:low], None, *declared[high + 1 :])
    assert reshaped(reshaped(layout, joined, None), declared, None) == layout


HEADS, DIM = Axis(4), Axis(16)


def of(*axes: Axis) -> Layout:
    return Layout(axes)


def test_heads_before_dimensions_before_tokens_become_channels():
    assert reshaped(of(SINGLE, HEADS, DIM, ROWS), (1, 64, None, 1), None) == of(
        SINGLE, Axis(64), ROWS, SINGLE
    )


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ((SINGLE, HEADS, ROWS, DIM), (1, 64, None, 1)),
        ((SINGLE, Axis(64), ROWS, SINGLE), (1, None, 4, 16)),
        ((SINGLE, Axis(64), ROWS, SINGLE), (1, 4, None, 16)),
        ((SINGLE, ROWS, HEADS, DIM), (1, 64, None, 1)),
    ],
    ids=["heads, tokens, dimensions", "tokens first", "tokens between", "tokens before channels"],
)
@pytest.mark.parametrize("rows", [None, 3, 4])
def test_another_order_is_mixed(
    axes: Sequence[Axis], shape: Sequence[int | None], rows: int | None
):
    layout = of(*axes)
    declared = tuple(rows if size is None else size for size in shape)
    try:
        made = reshaped(layout, declared, rows)
    except Mixed as error:
        assert "no axis for the rows" in str(error)
    else:
        # With as many rows as there are heads, they may lie within another axis.
        assert not any(axis.alone for axis in made.axes)


def test_a_shape_for_one_row_is_mixed():
    with pytest.raises(Mixed):
        reshaped(of(SINGLE, HEADS, DIM, ROWS), (1, 64, 1, 1), None)


def test_two_axes_of_rows_are_followed_while_they_stay_apart():
    scores = of(SINGLE, HEADS, ROWS, ROWS)
    assert reshaped(scores, (4, None, None), None) == of(HEADS, ROWS, ROWS)
    assert reshaped(scores, (4, 1, 4, 4), 4) == of(HEADS, SINGLE, ROWS, ROWS)
    with pytest.raises(Unfollowed):
        reshaped(scores, (1, None, 4, None), None)


def test_rows_meet_their_own_numbers_only():
    hidden = of(SINGLE, Axis(64), ROWS, SINGLE)
    assert together([hidden, plain((1, 64, 1, 1))], None) == hidden
    assert together([hidden, of(ROWS, SINGLE)], None) == hidden
    with pytest.raises(Mixed, match=r"puts \[1, 64, T, 1\] beside \[4\*T, 1\]"):
        together([hidden, of(Axis(4, True), SINGLE)], None)
    with pytest.raises(Mixed):
        together([hidden, of(Axis(64, True, 1), SINGLE, SINGLE)], None)


def test_a_constant_may_have_a_number_for_each_of_so_many_rows():
    hidden, table = of(SINGLE, Axis(64), ROWS, SINGLE), plain((1, 1, 4, 1), constant=True)
    for operands in ([hidden, table], [table, hidden]):
        assert together(operands, 4) == hidden
        with pytest.raises(Mixed):
            together(operands, 3)
    with pytest.raises(Mixed):
        together([hidden, plain((1, 1, 4, 1))], 4)


def test_rows_are_summed_over_each_with_its_own():
    contracted(ROWS, ROWS)
    contracted(DIM, DIM)
    for one, other in ((ROWS, DIM), (Axis(4, True), ROWS), (Axis(1, True, 4), Axis(4, True))):
        with pytest.raises(Mixed):
            contracted(one, other)
    with pytest.raises(Unfollowed):
        contracted(Axis(4, True), Axis(4, True))
    with pytest.raises(Unfollowed):
        contracted(ROWS, Axis(4), constant=True)


def test_what_is_made_of_all_rows_may_be_kept_and_not_given_to_each():
    mask, hidden = of(SINGLE, SINGLE, Axis(8), ROWS), of(SINGLE, Axis(8), ROWS, SINGLE)
    written = reduced(mask, [-1], keep=True)
    assert written.axes == (SINGLE, SINGLE, Axis(8), SINGLE)
    assert written.across
    one = plain((), constant=True)
    assert together([one, written], None).across
    assert not together([written, plain((1, 2, 8, 16))], None).across
    mean = reduced(hidden, [2], keep=True)
    with pytest.raises(Mixed, match="what was made of several rows"):
        together([hidden, mean], None)
    assert not reduced(hidden, [1], keep=True).across


def test_norms_go_over_channels_or_over_the_rows_that_a_row_sees():
    hidden = of(SINGLE, Axis(8), ROWS, SINGLE)
    assert normed(hidden, [1]) == hidden
    scores = of(SINGLE, HEADS, ROWS, ROWS)
    assert normed(scores, [-1]) == scores
    for axes in ([2], [1, 2]):
        with pytest.raises(Mixed, match="goes over the rows"):
            normed(hidden, axes)
    with pytest.raises(Mixed, match="rows and channels together"):
        normed(of(SINGLE, Axis(8, True)), [1])


def test_a_shape_of_nothing_is_not_followed():
    with pytest.raises(Unfollowed):
        reshaped(of(Axis(0), ROWS), (0, None), None)
