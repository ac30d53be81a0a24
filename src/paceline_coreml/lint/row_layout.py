"""The row axes of a tensor, and how operations transform them.

T, the number of rows, is the length of an axis: each index belongs to one row. Does not depend on
programs. Invariant: a layout is valid for every T; if that cannot be shown, `Untracked` is raised.

A row axis has length `before` * T * `after`, with `after` consecutive elements per row; both are 1
if it has only rows. A reshape can merge such an axis with its neighbors, or split it again. If the
T rows do not end up on one axis, rows and channels are mixed, which T = 1 does not reveal.

    8 heads of 16 channels    reshaped to
    [1, 8, 16, T]             [1, 128, T]     heads and channels merge; the last axis has the rows
    [1, 8, T, 16]             [1, 8*T*16]     one axis, 8 * T * 16: it can be split again
    [1, 8, T, 16]             [1, 128, T]     no axis for the rows: RowsMixed; correct if T = 1
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple

Declared = tuple[int | None, ...]
"""A program's declared shape; None: only known at run time."""


class RowsMixed(Exception):
    """The error that an operation combines elements of different rows."""


class Untracked(Exception):
    """The error that row axes cannot be determined."""


class Axis(NamedTuple):
    before: int
    rows: bool = False
    after: int = 1

    @property
    def rows_only(self) -> bool:
        """True if it has only rows."""
        return self.rows and self.before == self.after == 1

    @property
    def is_one(self) -> bool:
        return not self.rows and self.before == 1

    def __str__(self) -> str:
        parts = [str(self.before)] if self.before > 1 or not self.rows else []
        parts += ["T"] if self.rows else []
        return "*".join([*parts, str(self.after)] if self.after > 1 else parts)


ROWS = Axis(1, rows=True)
ONE = Axis(1)


@dataclass(frozen=True, slots=True)
class Layout:
    axes: tuple[Axis, ...]
    constant: bool = False
    """True if it is the same in every run."""
    from_many_rows: bool = False
    """True if it was computed from several rows, and has no row axis."""

    @property
    def rows(self) -> bool:
        return any(axis.rows for axis in self.axes)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.axes))}]"


def without_rows(shape: Declared, *, constant: bool = False) -> Layout:
    """Return a layout without rows. Raises Untracked if the shape is not known."""
    return Layout(tuple(map(Axis, _known(shape))), constant)


def broadcast(layouts: Sequence[Layout], count: int | None) -> Layout:
    """Return the layout of an elementwise operation, with numpy's broadcasting.

    `count` is T if the program is for one number of rows, else None. Raises RowsMixed if a row is
    combined with other rows.
    """
    rank = max(len(layout.axes) for layout in layouts)
    # Constants last: in a program for one number of rows, they may have one element per row.
    ordered = sorted(layouts, key=lambda layout: layout.constant)
    padded = [(*[ONE] * (rank - len(layout.axes)), *layout.axes) for layout in ordered]
    axes = tuple(_same(column, ordered, count) for column in zip(*padded, strict=True))
    joined = Layout(axes, all(layout.constant for layout in layouts))
    computed = [layout for layout in layouts if not layout.constant]
    if not joined.rows:
        # A value combined with a state is written to the state.
        of_many = bool(computed) and all(layout.from_many_rows for layout in computed)
        return replace(joined, from_many_rows=of_many)
    if any(layout.from_many_rows for layout in computed):
        raise RowsMixed("gives every row a value computed from several rows")
    return joined


def _same(column: Sequence[Axis], layouts: Sequence[Layout], count: int | None) -> Axis:
    """Return one axis of the result."""
    common, of = ONE, ""
    for axis, layout in zip(column, layouts, strict=True):
        per_row = layout.constant and common.rows_only and axis == Axis(count or 0)
        if axis.is_one or per_row:
            continue
        if not common.is_one and common != axis:
            if common.rows or axis.rows:
                raise RowsMixed(f"combines {of} with {layout}")
            raise Untracked(f"combines {of} with {layout}")
        common, of = axis, str(layout)
    return common


def check_contraction(x: Axis, y: Axis, *, constant: bool = False) -> None:
    """Check the contracted axis of two operands; `constant`: one operand is constant.

    Rows may be contracted with the same rows: this writes rows to KV slots, and lets rows of a
    whole text attend to each other.

    Raises:
        RowsMixed: rows are contracted with an axis without rows.
        Untracked: rows are contracted with constants, or together with channels.
    """
    if not (x.rows or y.rows):
        return
    if x != y:
        if constant and (x.rows_only or y.rows_only):
            raise Untracked("multiplies each row by a constant")
        raise RowsMixed(f"sums over an axis of {x} and one of {y}")
    if not x.rows_only:
        raise Untracked(f"sums over an axis of {x}")


def reduce_axes(layout: Layout, axes: Iterable[int], *, keep: bool) -> Layout:
    """Return a reduction's layout. Raises RowsMixed if an axis has rows and channels."""
    gone = {axis % len(layout.axes) for axis in axes}
    for axis in gone:
        if layout.axes[axis].rows and not layout.axes[axis].rows_only:
            raise RowsMixed(f"sums an axis of {layout.axes[axis]}, rows and channels together")
    over_rows = any(layout.axes[axis].rows for axis in gone)
    left = tuple(
        ONE if number in gone else axis
        for number, axis in enumerate(layout.axes)
        if keep or number not in gone
    )
    reduced = Layout(left, layout.constant, layout.from_many_rows)
    return replace(
        reduced, from_many_rows=reduced.from_many_rows or (over_rows and not reduced.rows)
    )


def check_normalized(layout: Layout, axes: Iterable[int]) -> Layout:
    """Return the layout of a softmax or norm over axes.

    Raises RowsMixed if it normalizes over rows, or over an axis with rows and channels.
    """
    axes = list(axes)
    if layout.rows and reduce_axes(layout, axes, keep=True).from_many_rows:
        raise RowsMixed(f"runs along the rows of {layout}")
    return layout


def reshape(layout: Layout, shape: Declared, count: int | None) -> Layout:
    """Return the layout after a reshape.

    Raises:
        RowsMixed: the rows do not end up on one axis.
        Untracked: the shape has too many unknown sizes.
    """
    if not layout.rows:
        return replace(layout, axes=without_rows(shape).axes)
    between = [1]
    """Elements before the rows, between row axes, and after them."""
    for axis in layout.axes:
        between[-1] *= axis.before
        if axis.rows:
            between.append(axis.after)
    if len(between) > 2:
        return replace(layout, axes=_separate(shape, between, count))
    axes = _on_one_axis(shape, between, count)
    if axes is None:
        raise RowsMixed(f"turns {layout} into {_text(shape)}, without an axis for the rows")
    return replace(layout, axes=axes)


def _on_one_axis(
    shape: Declared, between: Sequence[int], count: int | None
) -> tuple[Axis, ...] | None:
    """Return the axes of a shape if all rows are on one of them, else None."""
    open_ended = [number for number, size in enumerate(shape) if size is None]
    if len(open_ended) > 1 or 0 in shape:
        raise Untracked(f"makes {_text(shape)}")
    for number in open_ended if count is None else range(len(shape)):
        before = math.prod(_known(shape[:number]))
        after = math.prod(_known(shape[number + 1 :]))
        axis = Axis(between[0] // before, True, between[1] // after)
        if between[0] % before or between[1] % after:
            continue
        if count is None or shape[number] == axis.before * count * axis.after:
            return (
                *without_rows(shape[:number]).axes,
                axis,
                *without_rows(shape[number + 1 :]).axes,
            )
    return None


def _separate(shape: Declared, between: Sequence[int], count: int | None) -> tuple[Axis, ...]:
    """Return the axes of a shape whose several row axes stay separate and in order."""
    possible = [number for number, size in enumerate(shape) if size == count]
    for places in combinations(possible, len(between) - 1):
        edges = [-1, *places, len(shape)]
        sizes = [shape[low + 1 : high] for low, high in pairwise(edges)]
        if all(
            None not in part and math.prod(_known(part)) == size
            for part, size in zip(sizes, between, strict=True)
        ):
            return tuple(ROWS if n in places else Axis(size or 0) for n, size in enumerate(shape))
    raise Untracked(f"makes {_text(shape)}")


def _known(shape: Declared) -> list[int]:
    if None in shape:
        raise Untracked(f"makes {_text(shape)}")
    return [size for size in shape if size is not None]


def _text(shape: Declared) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
