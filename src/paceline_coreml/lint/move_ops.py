"""Row layouts of operations that only move elements.

Handlers raise `RowsMixed` or `Untracked`, like `row_layout`.
"""

from dataclasses import replace

from paceline_coreml.lint.op_handlers import OpContext, handles
from paceline_coreml.lint.row_layout import (
    ONE,
    Axis,
    Layout,
    Untracked,
    broadcast,
    reshape,
    without_rows,
)


@handles("transpose")
def _transpose(call: OpContext) -> Layout:
    x = call.operand()
    return replace(x, axes=tuple(x.axes[axis] for axis in call.ints("perm")))


@handles("write_state")
def _write_state(call: OpContext) -> list[Layout]:
    return []


@handles("reshape")
def _reshape(call: OpContext) -> Layout:
    return reshape(call.operand(), call.declared[0], call.count)


@handles("expand_dims")
def _expand_dims(call: OpContext) -> Layout:
    x, rank = call.operand(), len(call.declared[0])
    new = {axis % rank for axis in call.ints("axes")}
    left = iter(x.axes)
    return replace(x, axes=tuple(ONE if n in new else next(left) for n in range(rank)))


@handles("squeeze")
def _squeeze(call: OpContext) -> Layout:
    x = call.operand()
    named = {axis % len(x.axes) for axis in call.ints("axes", range(len(x.axes)))}
    left = [axis for n, axis in enumerate(x.axes) if n not in named or not axis.is_one]
    return replace(x, axes=tuple(left))


@handles("concat")
def _concat(call: OpContext) -> Layout:
    operands = call.op.inputs.get("values", ())
    parts = [call.layouts(operand) or without_rows(()) for operand in operands]
    axis = call.ints("axis")[0] % len(parts[0].axes)
    if any(part.axes[axis].rows for part in parts):
        raise Untracked("concatenates along rows")
    rest = [replace(part, axes=(*part.axes[:axis], ONE, *part.axes[axis + 1 :])) for part in parts]
    layout = broadcast(rest, call.count)
    joined = Axis(sum(part.axes[axis].before for part in parts))
    return replace(layout, axes=(*layout.axes[:axis], joined, *layout.axes[axis + 1 :]))


@handles("split")
def _split(call: OpContext) -> list[Layout]:
    x = call.operand()
    axis = call.ints("axis")[0] % len(x.axes)
    if x.axes[axis].rows:
        raise Untracked(f"splits {x} between rows")
    return [
        replace(
            x,
            axes=(*x.axes[:axis], *without_rows(shape[axis : axis + 1]).axes, *x.axes[axis + 1 :]),
        )
        for shape in call.declared
    ]


@handles("tile")
def _tile(call: OpContext) -> Layout:
    x = call.operand()
    times = call.ints("reps")
    return replace(
        x,
        axes=tuple(
            axis._replace(before=axis.before * n) for axis, n in zip(x.axes, times, strict=True)
        ),
    )


@handles("slice_by_index")
def _slice_by_index(call: OpContext) -> Layout:
    x = call.operand()
    nothing = [0] * len(x.axes)
    dropped = call.ints("squeeze_mask", nothing)
    shape = iter(call.declared[0])
    axes, from_many_rows = [], x.from_many_rows
    for number, axis in enumerate(x.axes):
        declared = 1 if dropped[number] else next(shape)
        result_axis = axis if axis.rows else without_rows((declared,)).axes[0]
        if axis.rows and not _is_whole(call, number, axis, declared):
            if declared != 1 or not axis.rows_only:
                raise Untracked(f"takes some of the rows of {x}")
            result_axis, from_many_rows = ONE, True  # one row, used for all
        if not dropped[number]:
            axes.append(result_axis)
    layout = Layout(tuple(axes), x.constant)
    return replace(layout, from_many_rows=from_many_rows and not layout.rows)


def _is_whole(call: OpContext, number: int, axis: Axis, declared: int | None) -> bool:
    """Return True if a slice takes all of an axis with rows."""
    nothing = [0] * (number + 1)
    if call.ints("stride", [1] * (number + 1))[number] != 1:
        return False
    from_start = call.ints("begin_mask", nothing)[number] or call.ints("begin")[number] == 0
    to_end = call.ints("end_mask", nothing)[number] or (
        call.count is not None and declared == axis.before * call.count * axis.after
    )
    return bool(from_start and to_end)


@handles("slice_update")
def _slice_update(call: OpContext) -> Layout:
    x, update = call.operand(), call.operand("update")
    if x.axes == update.axes:
        return update
    if x.rows:
        raise Untracked(f"writes {update} into {x}")
    return x  # rows go to the slots starting at `begin`
