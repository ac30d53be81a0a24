"""Row layouts of operations that compute: elementwise, reductions, products.

Handlers raise `RowsMixed` or `Untracked`, like `row_layout`.
"""

from dataclasses import replace
from typing import Final

from paceline_coreml.lint.op_handlers import OpContext, handles
from paceline_coreml.lint.row_layout import (
    Axis,
    Layout,
    RowsMixed,
    Untracked,
    broadcast,
    check_contraction,
    check_normalized,
    reduce_axes,
    without_rows,
)

BROADCASTING: Final = {"add", "sub", "mul", "real_div", "pow", "maximum"}
"""Elementwise operations that broadcast their operands."""
_UNARY: Final = {
    "abs", "cast", "clip", "exp", "gelu", "identity", "rsqrt", "sigmoid", "sign", "silu",
}  # fmt: skip
_REDUCING: Final = {"reduce_sum", "reduce_mean", "reduce_max"}


@handles(*BROADCASTING)
def _broadcast(call: OpContext) -> Layout:
    return broadcast(call.operands(), call.count)


@handles(*_UNARY)
def _unary(call: OpContext) -> Layout:
    return call.operand()


@handles(*_REDUCING)
def _reduce(call: OpContext) -> Layout:
    x = call.operand()
    axes = call.ints("axes", range(len(x.axes)))
    return reduce_axes(x, axes, keep=bool(call.ints("keep_dims", [0])[0]))


@handles("softmax")
def _softmax(call: OpContext) -> Layout:
    return check_normalized(call.operand(), call.ints("axis", [-1]))


@handles("matmul")
def _matmul(call: OpContext) -> Layout:
    x, y = call.operand(), call.operand("y")
    if min(len(x.axes), len(y.axes)) < 2:
        raise Untracked(f"multiplies {x} and {y}")
    *x_batch, left, x_sum = _transposed(x, call.ints("transpose_x", [0])[0])
    *y_batch, y_sum, right = _transposed(y, call.ints("transpose_y", [0])[0])
    check_contraction(x_sum, y_sum, constant=x.constant or y.constant)
    batch = broadcast(
        [replace(x, axes=tuple(x_batch)), replace(y, axes=tuple(y_batch))], call.count
    )
    return Layout((*batch.axes, left, right))


def _transposed(layout: Layout, transposed: int) -> tuple[Axis, ...]:
    *rest, a, b = layout.axes
    return (*rest, b, a) if transposed else layout.axes


@handles("conv")
def _conv(call: OpContext) -> Layout:
    """Check that the kernel does not span several rows."""
    x, weight = call.operand(), call.operand("weight")
    batch, channels, *places = x.axes
    if weight.rows:
        raise Untracked(f"has the weights {weight}")
    if channels.rows:
        raise RowsMixed(f"sums the channels of {x}, which hold rows")
    if any(axis.rows for axis in places) and not all(axis.is_one for axis in weight.axes[2:]):
        raise Untracked(f"has a kernel over the rows of {x}")
    declared = call.declared[0][2:]
    others = [
        axis if axis.rows else without_rows((size,)).axes[0]
        for axis, size in zip(places, declared, strict=True)
    ]
    return Layout((batch, weight.axes[0], *others))
