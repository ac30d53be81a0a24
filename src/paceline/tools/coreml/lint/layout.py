"""Where the rows of a call stand in a tensor, and what operations do to that.

T, the number of rows, is the length of an axis: every place of that axis belongs to one row. Knows
sizes and axes; knows no program. The rule: what is said of a layout holds for every T, and where it
could not be said, that is said.

An axis is `before` * T * `after` long if rows stand on it, the numbers of one row `after` at a
time; an axis of the rows alone has both 1. All that `reshape` can do to such an axis is to put it
together with its neighbours, or to take it apart again. Where the T places of the rows do not come
to lie on one axis, they are spread over two, and rows and channels are mixed up: with T = 1 nothing
is to be seen of that.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple

Declared = tuple[int | None, ...]
"""A shape as a program declares it; None: not known before it runs."""


class Mixed(Exception):
    """Numbers of different rows are put together that belong apart."""


class Unfollowed(Exception):
    """It cannot be said where the rows are."""


class Axis(NamedTuple):
    """One axis: of no row, or of rows."""

    before: int
    rows: bool = False
    after: int = 1

    @property
    def alone(self) -> bool:
        """Whether rows stand on it, and nothing else."""
        return self.rows and self.before == self.after == 1

    @property
    def single(self) -> bool:
        """Whether it is one number long."""
        return not self.rows and self.before == 1

    def __str__(self) -> str:
        parts = [str(self.before)] if self.before > 1 or not self.rows else []
        parts += ["T"] if self.rows else []
        return "*".join([*parts, str(self.after)] if self.after > 1 else parts)


ROWS = Axis(1, rows=True)
SINGLE = Axis(1)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor's axes."""

    axes: tuple[Axis, ...]
    constant: bool = False
    """Whether it is the same in every call."""
    across: bool = False
    """Whether it says something of several rows, without an axis of theirs."""

    @property
    def rows(self) -> bool:
        """Whether rows stand on one of its axes."""
        return any(axis.rows for axis in self.axes)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.axes))}]"


def plain(shape: Declared, *, constant: bool = False) -> Layout:
    """A tensor without rows. Raises Unfollowed where its shape is not known."""
    return Layout(tuple(map(Axis, _known(shape))), constant)


def together(layouts: Sequence[Layout], count: int | None) -> Layout:
    """What comes of operands of the same place each, spread as numpy does.

    `count` is T where the program is for one number of rows only, else None.

    Raises:
        Mixed: a row meets other rows.
    """
    rank = max(len(one.axes) for one in layouts)
    # Constants last: in a program for one number of rows they may have a number for each.
    ordered = sorted(layouts, key=lambda one: one.constant)
    padded = [(*[SINGLE] * (rank - len(one.axes)), *one.axes) for one in ordered]
    axes = tuple(_same(column, ordered, count) for column in zip(*padded, strict=True))
    made = Layout(axes, all(one.constant for one in layouts))
    computed = [one for one in layouts if not one.constant]
    if not made.rows:
        # What is put together with something kept, a state, is kept with it.
        return replace(made, across=bool(computed) and all(one.across for one in computed))
    if any(one.across for one in computed):
        raise Mixed("gives every row what was made of several rows")
    return made


def _same(column: Sequence[Axis], layouts: Sequence[Layout], count: int | None) -> Axis:
    """One axis of several operands."""
    found, of = SINGLE, ""
    for axis, layout in zip(column, layouts, strict=True):
        for_each_row = layout.constant and found.alone and axis == Axis(count or 0)
        if axis.single or for_each_row:
            continue
        if not found.single and found != axis:
            if found.rows or axis.rows:
                raise Mixed(f"puts {of} beside {layout}")
            raise Unfollowed(f"puts {of} beside {layout}")
        found, of = axis, str(layout)
    return found


def contracted(x: Axis, y: Axis, *, constant: bool = False) -> None:
    """Check what two operands are summed over; `constant`: one of them is.

    Rows may be summed over where both operands have them, each with its own: that is how rows are
    written into slots, and how those of a whole text see each other.

    Raises:
        Mixed: rows are summed over that the other operand does not tell apart.
        Unfollowed: each has a weight of its own, or they are summed together with something else.
    """
    if not (x.rows or y.rows):
        return
    if x != y:
        if constant and (x.alone or y.alone):
            raise Unfollowed("weighs each row with a constant")
        raise Mixed(f"sums over an axis of {x} and one of {y}")
    if not x.alone:
        raise Unfollowed(f"sums over an axis of {x}")


def reduced(layout: Layout, axes: Iterable[int], *, keep: bool) -> Layout:
    """What comes of summing over axes, or taking the largest.

    Raises:
        Mixed: an axis has more than rows on it.
    """
    gone = {axis % len(layout.axes) for axis in axes}
    for axis in gone:
        if layout.axes[axis].rows and not layout.axes[axis].alone:
            raise Mixed(f"sums an axis of {layout.axes[axis]}, rows and channels together")
    over_rows = any(layout.axes[axis].rows for axis in gone)
    left = tuple(
        SINGLE if number in gone else axis
        for number, axis in enumerate(layout.axes)
        if keep or number not in gone
    )
    made = Layout(left, layout.constant, layout.across)
    return replace(made, across=made.across or (over_rows and not made.rows))


def normed(layout: Layout, axes: Iterable[int]) -> Layout:
    """What comes of a softmax or a norm over axes.

    Raises:
        Mixed: it goes over the rows, or over an axis that has more than rows on it.
    """
    axes = list(axes)
    if layout.rows and reduced(layout, axes, keep=True).across:
        raise Mixed(f"goes over the rows of {layout}")
    return layout


def reshaped(layout: Layout, shape: Declared, count: int | None) -> Layout:
    """The same numbers in their order, in another shape.

    Raises:
        Mixed: rows do not come to lie on one axis.
        Unfollowed: the shape does not say enough.
    """
    if not layout.rows:
        return replace(layout, axes=plain(shape).axes)
    between = [1]
    """How many numbers stand before the rows, between them, and after them."""
    for axis in layout.axes:
        between[-1] *= axis.before
        if axis.rows:
            between.append(axis.after)
    if len(between) > 2:
        return replace(layout, axes=_kept_apart(shape, between, count))
    found = _on_one_axis(shape, between, count)
    if found is None:
        raise Mixed(f"makes {_text(shape)} of {layout}, with no axis for the rows")
    return replace(layout, axes=found)


def _on_one_axis(
    shape: Declared, between: Sequence[int], count: int | None
) -> tuple[Axis, ...] | None:
    """The axes of a shape if all rows come to lie on one of them."""
    open_ended = [number for number, size in enumerate(shape) if size is None]
    if len(open_ended) > 1 or 0 in shape:
        raise Unfollowed(f"makes {_text(shape)}")
    for number in open_ended if count is None else range(len(shape)):
        before = math.prod(_known(shape[:number]))
        after = math.prod(_known(shape[number + 1 :]))
        axis = Axis(between[0] // before, True, between[1] // after)
        if between[0] % before or between[1] % after:
            continue
        if count is None or shape[number] == axis.before * count * axis.after:
            return (*plain(shape[:number]).axes, axis, *plain(shape[number + 1 :]).axes)
    return None


def _kept_apart(shape: Declared, between: Sequence[int], count: int | None) -> tuple[Axis, ...]:
    """The axes of a shape in which two axes of rows or more stay alone and in their order."""
    possible = [number for number, size in enumerate(shape) if size == count]
    for found in combinations(possible, len(between) - 1):
        edges = [-1, *found, len(shape)]
        sizes = [shape[low + 1 : high] for low, high in pairwise(edges)]
        if all(
            None not in part and math.prod(_known(part)) == size
            for part, size in zip(sizes, between, strict=True)
        ):
            return tuple(ROWS if n in found else Axis(size or 0) for n, size in enumerate(shape))
    raise Unfollowed(f"makes {_text(shape)}")


def _known(shape: Declared) -> list[int]:
    if None in shape:
        raise Unfollowed(f"makes {_text(shape)}")
    return [size for size in shape if size is not None]


def _text(shape: Declared) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
