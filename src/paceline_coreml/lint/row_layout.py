"""The row axes of a tensor, and how operations transform them.

T, the number of rows, is the length of an axis: each index belongs to one row. Does not depend on
programs. If a layout cannot be determined, `Untracked` is raised.

A row axis has length `before` * T * `after`, with `after` consecutive elements per row; both are 1
if it has only rows. A reshape can merge such an axis with its neighbors, or split it again. If the
T rows do not end up on one axis, rows and channels are mixed, which T = 1 does not reveal.

    8 heads of 16 channels    reshaped to
    [1, 8, 16, T]             [1, 128, T]     heads and channels merge; the last axis has the rows
    [1, 8, T, 16]             [1, 8*T*16]     one axis, 8 * T * 16: it can be split again
    [1, 8, T, 16]             [1, 128, T]     no axis for the rows: RowsMixed; correct if T = 1

Operations that only move elements run on *marks*, arrays whose elements are the numbers of their
rows; the layout of the result is read off the moved marks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_coreml.rehearsal.ops import OPS

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

    def length(self, count: int) -> int:
        return self.before * (count if self.rows else 1) * self.after

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
    sizes = [size for size in shape if size is not None]
    if len(sizes) < len(shape):
        raise Untracked(f"makes {str(list(shape)).replace('None', '?')}")
    return Layout(tuple(map(Axis, sizes)), constant)


def marks_of(layout: Layout, count: int) -> npt.NDArray[np.int64]:
    """Return the marks of a layout for `count` rows, with one digit (base `count`) per row axis."""
    shape = [axis.length(count) for axis in layout.axes]
    marks, unit = np.zeros(shape, np.int64), 1
    for number, axis in enumerate(layout.axes):
        if axis.rows:
            rows = np.arange(shape[number]) // axis.after % count
            marks += unit * np.expand_dims(rows, [n for n in range(len(shape)) if n != number])
            unit *= count
    return marks


def layout_of(marks: npt.NDArray[Any], count: int, row_axes: int) -> Layout:
    """Return the layout of moved marks, which have `row_axes` digits.

    Raises:
        RowsMixed: rows are on several axes.
        Untracked: some of the rows are missing, but more than one is left.
    """
    axes, one_for_all = list(map(Axis, marks.shape)), False
    for digit in range(row_axes):
        rows = marks // count**digit % count
        varying = [n for n in range(rows.ndim) if (rows != rows.take([0], n)).any()]
        if len(varying) > 1:
            raise RowsMixed(f"makes {list(marks.shape)} of {count} rows, which are on several axes")
        if not varying:
            one_for_all = True
            continue
        along = rows[tuple(slice(None) if n == varying[0] else 0 for n in range(rows.ndim))]
        after = int((along == along[0]).argmin())
        if len(along) % (after * count) or (along != np.arange(len(along)) // after % count).any():
            raise Untracked("takes some of the rows")
        axes[varying[0]] = Axis(len(along) // (after * count), True, after)
    layout = Layout(tuple(axes))
    return replace(layout, from_many_rows=one_for_all and not layout.rows)


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


# --- operations, by type; a handler has the parameters of MIL's operation, with layouts for arrays

BROADCASTING: Final = {"add", "sub", "mul", "real_div", "pow", "maximum"}
"""Elementwise operations that broadcast their operands."""
_UNARY: Final = {
    "abs", "cast", "clip", "exp", "gelu", "identity", "rsqrt", "sigmoid", "sign", "silu",
}  # fmt: skip
_REDUCING: Final = {"reduce_sum", "reduce_mean", "reduce_max"}
_MOVING: Final = {
    "concat", "expand_dims", "reshape", "slice_by_index", "split", "squeeze", "tile", "transpose",
}  # fmt: skip

_ROWS: Final = 13
"""T for marks if it is not fixed; a number that is unlikely to be a size in a program."""


def results_of(
    kind: str, arguments: Mapping[str, Any], count: int | None
) -> Layout | Sequence[Layout]:
    """Return the layouts of an operation's outputs; `count` is T if it is fixed, else None."""
    if kind in BROADCASTING:
        return broadcast(list(arguments.values()), count)
    if kind in _UNARY:
        result: Layout = arguments["x"]
        return result
    if kind in _MOVING:
        return _moved(kind, arguments, count or _ROWS)
    if kind not in _HANDLERS:
        raise Untracked("has no handler")
    return _HANDLERS[kind](**arguments)


def _moved(kind: str, arguments: Mapping[str, Any], count: int) -> list[Layout]:
    """Run an operation that only moves elements, on marks."""
    values = arguments["values"] if kind == "concat" else (arguments["x"],)
    numbers = {sum(axis.rows for axis in value.axes) for value in values}
    if len(numbers) > 1:
        raise Untracked("joins values with and without rows")
    marks = tuple(marks_of(value, count) for value in values)
    given = {"values": marks} if kind == "concat" else {"x": marks[0]}
    try:
        moved = OPS[kind].run(**{**arguments, **given})
    except ValueError as error:
        raise RowsMixed(f"of {values[0]} fails for {count} rows: {error}") from error
    outputs = moved if isinstance(moved, tuple) else (moved,)
    return [layout_of(output, count, *numbers) for output in outputs]


def _reduce(x: Layout, axes: Sequence[int] | None = None, keep_dims: bool = False) -> Layout:
    return reduce_axes(x, range(len(x.axes)) if axes is None else axes, keep=keep_dims)


def _softmax(x: Layout, axis: int = -1) -> Layout:
    return check_normalized(x, [axis])


def _matmul(x: Layout, y: Layout, transpose_x: bool = False, transpose_y: bool = False) -> Layout:
    if min(len(x.axes), len(y.axes)) < 2:
        raise Untracked(f"multiplies {x} and {y}")
    *x_batch, left, x_sum = _transposed(x) if transpose_x else x.axes
    *y_batch, y_sum, right = _transposed(y) if transpose_y else y.axes
    check_contraction(x_sum, y_sum, constant=x.constant or y.constant)
    batches = [replace(x, axes=tuple(x_batch)), replace(y, axes=tuple(y_batch))]
    return Layout((*broadcast(batches, None).axes, left, right))


def _transposed(layout: Layout) -> tuple[Axis, ...]:
    *rest, a, b = layout.axes
    return (*rest, b, a)


def _conv(x: Layout, weight: Layout, **_: Any) -> Layout:
    batch, channels, *places = x.axes
    if weight.rows:
        raise Untracked(f"has the weights {weight}")
    if channels.rows:
        raise RowsMixed(f"sums the channels of {x}, which hold rows")
    if not all(axis.is_one for axis in weight.axes[2:]):
        raise Untracked(f"has a kernel over several places of {x}")
    return Layout((batch, weight.axes[0], *places))


def _slice_update(x: Layout, update: Layout, **_: Any) -> Layout:
    if x.axes == update.axes:
        return update
    if x.rows:
        raise Untracked(f"writes {update} into {x}")
    return x  # rows go to the slots starting at `begin`


_HANDLERS: Final[Mapping[str, Callable[..., Layout | Sequence[Layout]]]] = {
    **dict.fromkeys(_REDUCING, _reduce),
    "softmax": _softmax,
    "matmul": _matmul,
    "conv": _conv,
    "slice_update": _slice_update,
    "write_state": lambda **_: (),
}
