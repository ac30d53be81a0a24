"""Following rows through operations that only put numbers into other places.

Raise `Mixed` or `Unfollowed` as `layout` does.
"""

from dataclasses import replace

from paceline.tools.coreml.lint.call import Call, kind
from paceline.tools.coreml.lint.layout import (
    SINGLE,
    Axis,
    Layout,
    Unfollowed,
    plain,
    reshaped,
    together,
)


@kind("transpose")
def _transpose(call: Call) -> Layout:
    x = call.given()
    return replace(x, axes=tuple(x.axes[axis] for axis in call.ints("perm")))


@kind("shape")
def _shape(call: Call) -> Layout:
    return plain(call.declared[0])


@kind("write_state")
def _write_state(call: Call) -> list[Layout]:
    return []


@kind("reshape")
def _reshape(call: Call) -> Layout:
    return reshaped(call.given(), call.declared[0], call.count)


@kind("expand_dims")
def _expand_dims(call: Call) -> Layout:
    x, rank = call.given(), len(call.declared[0])
    new = {axis % rank for axis in call.ints("axes")}
    left = iter(x.axes)
    return replace(x, axes=tuple(SINGLE if n in new else next(left) for n in range(rank)))


@kind("squeeze")
def _squeeze(call: Call) -> Layout:
    x = call.given()
    named = {axis % len(x.axes) for axis in call.ints("axes", range(len(x.axes)))}
    left = [axis for n, axis in enumerate(x.axes) if n not in named or not axis.single]
    return replace(x, axes=tuple(left))


@kind("concat")
def _concat(call: Call) -> Layout:
    parts = [call.layouts(one) or plain(()) for one in call.op.inputs.get("values", ())]
    axis = call.ints("axis")[0] % len(parts[0].axes)
    if any(part.axes[axis].rows for part in parts):
        raise Unfollowed("puts rows one after another with others")
    rest = [
        replace(part, axes=(*part.axes[:axis], SINGLE, *part.axes[axis + 1 :])) for part in parts
    ]
    made = together(rest, call.count)
    joined = Axis(sum(part.axes[axis].before for part in parts))
    return replace(made, axes=(*made.axes[:axis], joined, *made.axes[axis + 1 :]))


@kind("stack")
def _stack(call: Call) -> Layout:
    parts = [call.layouts(one) or plain(()) for one in call.op.inputs.get("values", ())]
    made = together(parts, call.count)
    axis = call.ints("axis")[0] % (len(made.axes) + 1)
    return replace(made, axes=(*made.axes[:axis], Axis(len(parts)), *made.axes[axis:]))


@kind("split")
def _split(call: Call) -> list[Layout]:
    x = call.given()
    axis = call.ints("axis")[0] % len(x.axes)
    if x.axes[axis].rows:
        raise Unfollowed(f"splits {x} between rows")
    return [
        replace(x, axes=(*x.axes[:axis], *plain(shape[axis : axis + 1]).axes, *x.axes[axis + 1 :]))
        for shape in call.declared
    ]


@kind("tile")
def _tile(call: Call) -> Layout:
    x = call.given()
    times = call.ints("reps")
    return replace(
        x,
        axes=tuple(
            axis._replace(before=axis.before * n) for axis, n in zip(x.axes, times, strict=True)
        ),
    )


@kind("slice_by_index")
def _slice_by_index(call: Call) -> Layout:
    x = call.given()
    nothing = [0] * len(x.axes)
    dropped = call.ints("squeeze_mask", nothing)
    shape = iter(call.declared[0])
    axes, across = [], x.across
    for number, axis in enumerate(x.axes):
        declared = 1 if dropped[number] else next(shape)
        made = axis if axis.rows else plain((declared,)).axes[0]
        if axis.rows and not _is_whole(call, number, axis, declared):
            if declared != 1 or not axis.alone:
                raise Unfollowed(f"takes some of the rows of {x}")
            made, across = SINGLE, True  # one row, which stands for all
        if not dropped[number]:
            axes.append(made)
    layout = Layout(tuple(axes), x.constant)
    return replace(layout, across=across and not layout.rows)


def _is_whole(call: Call, number: int, axis: Axis, declared: int | None) -> bool:
    """Whether a slice takes all of an axis of rows."""
    nothing = [0] * (number + 1)
    if call.ints("stride", [1] * (number + 1))[number] != 1:
        return False
    from_start = call.ints("begin_mask", nothing)[number] or call.ints("begin")[number] == 0
    to_end = call.ints("end_mask", nothing)[number] or (
        call.count is not None and declared == axis.before * call.count * axis.after
    )
    return bool(from_start and to_end)


@kind("slice_by_size")
def _slice_by_size(call: Call) -> Layout:
    x = call.given()
    begin, size = call.ints("begin"), call.ints("size")
    axes = []
    for axis, first_one, length, declared in zip(
        x.axes, begin, size, call.declared[0], strict=True
    ):
        if axis.rows and (first_one, length) != (0, -1):
            raise Unfollowed(f"takes some of the rows of {x}")
        axes.append(axis if axis.rows else plain((declared,)).axes[0])
    return replace(x, axes=tuple(axes))


@kind("slice_update")
def _slice_update(call: Call) -> Layout:
    x, update = call.given(), call.given("update")
    if x.axes == update.axes:
        return update
    if x.rows:
        raise Unfollowed(f"writes {update} into {x}")
    return x  # rows that go to slots: which, `begin` says


@kind("gather")
def _gather(call: Call) -> Layout:
    x, indices = call.given(), call.given("indices")
    axis = call.ints("axis", [0])[0] % len(x.axes)
    if x.rows or call.ints("batch_dims", [0])[0]:
        raise Unfollowed(f"takes places of {x}")
    return Layout((*x.axes[:axis], *indices.axes, *x.axes[axis + 1 :]))
