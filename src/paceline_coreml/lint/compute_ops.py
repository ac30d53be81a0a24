"""Row layouts of operations that compute: elementwise, reductions, products.

Handlers raise `RowsMixed` or `Untracked` as `row_layout` does.
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

BROADCASTING: Final = {
    "add", "sub", "mul", "real_div", "floor_div", "pow", "mod", "maximum", "minimum", "select",
    "equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_and",
    "logical_or", "logical_xor",
}  # fmt: skip
"""Elementwise operations that broadcast their operands."""
_UNARY: Final = {
    "abs", "cast", "ceil", "clip", "cos", "erf", "exp", "exp2", "floor", "gelu", "identity",
    "inverse", "leaky_relu", "log", "logical_not", "relu", "relu6", "round", "rsqrt", "sigmoid",
    "sign", "silu", "sin", "softplus", "softsign", "sqrt", "square", "tan", "tanh",
}  # fmt: skip
_REDUCING: Final = {
    "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum_square",
    "reduce_l1_norm", "reduce_l2_norm", "reduce_log_sum", "reduce_log_sum_exp",
}  # fmt: skip


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


@handles("layer_norm")
def _layer_norm(call: OpContext) -> Layout:
    x = call.operand()
    return check_normalized(x, call.ints("axes", range(len(x.axes))))


@handles("l2_norm")
def _l2_norm(call: OpContext) -> Layout:
    return check_normalized(call.operand(), (-1, -2, -3))


@handles("argsort", "cumsum", "topk")
def _ordered(call: OpContext) -> list[Layout]:
    x = call.operand()
    axis = call.ints("axis", [-1])[0] % len(x.axes)
    if x.axes[axis].rows:
        raise RowsMixed(f"runs along the rows of {x}")
    return [
        replace(
            x,
            axes=(*x.axes[:axis], *without_rows(shape[axis : axis + 1]).axes, *x.axes[axis + 1 :]),
        )
        for shape in call.declared
    ]


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


@handles("linear")
def _linear(call: OpContext) -> Layout:
    x, weight = call.operand(), call.operand("weight")
    check_contraction(x.axes[-1], weight.axes[-1], constant=weight.constant)
    return Layout((*x.axes[:-1], weight.axes[0]))


@handles("conv")
def _conv(call: OpContext) -> Layout:
    """A kernel over several rows must be causal."""
    x, weight = call.operand(), call.operand("weight")
    batch, channels, *places = x.axes
    if weight.rows:
        raise Untracked(f"has the weights {weight}")
    if channels.rows:
        raise RowsMixed(f"sums the channels of {x}, which hold rows")
    if not any(axis.rows for axis in places):
        return Layout((batch, *without_rows(call.declared[0][1:]).axes))
    count = len(places)
    stride = call.ints("strides", [1] * count)
    dilation = call.ints("dilations", [1] * count)
    custom = call.text("pad_type", "valid") == "custom"
    pad = call.ints("pad", [0] * 2 * count) if custom else [0] * 2 * count
    axes = [batch, weight.axes[0]]
    for n, axis in enumerate(places):
        span = (weight.axes[2 + n].before - 1) * dilation[n]
        if axis.rows and (stride[n] != 1 or (pad[2 * n], pad[2 * n + 1]) != (span, 0)):
            raise Untracked(f"has a kernel over the rows of {x} that is not causal")
        axes.append(axis if axis.rows else without_rows(call.declared[0][2 + n : 3 + n]).axes[0])
    return Layout(tuple(axes))


@handles("scaled_dot_product_attention")
def _attention(call: OpContext) -> Layout:
    query, key, value = (call.operand(name) for name in ("query", "key", "value"))
    check_contraction(query.axes[-1], key.axes[-1])
    check_contraction(key.axes[-2], value.axes[-2])
    batch = broadcast(
        [replace(operand, axes=operand.axes[:-2]) for operand in (query, key, value)], call.count
    )
    scores = Layout((*batch.axes, query.axes[-2], key.axes[-2]))
    if "attn_mask" in call.op.inputs:
        scores = broadcast([scores, call.operand("attn_mask")], call.count)
    check_normalized(scores, [-1])
    return Layout((*batch.axes, query.axes[-2], value.axes[-1]))
