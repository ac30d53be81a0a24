"""Following rows through operations that compute: number by number, sums, products.

Raise `Mixed` or `Unfollowed` as `layout` does.
"""

from dataclasses import replace
from typing import Final

from paceline.tools.coreml.lint.call import Call, kind
from paceline.tools.coreml.lint.layout import (
    Axis,
    Layout,
    Mixed,
    Unfollowed,
    contracted,
    normed,
    plain,
    reduced,
    together,
)

SPREADING: Final = {
    "add", "sub", "mul", "real_div", "floor_div", "pow", "mod", "maximum", "minimum", "select",
    "equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_and",
    "logical_or", "logical_xor",
}  # fmt: skip
"""Operations that take numbers of the same place, and spread what is given once."""
_ALIKE: Final = {
    "abs", "cast", "ceil", "clip", "cos", "erf", "exp", "exp2", "floor", "gelu", "identity",
    "inverse", "leaky_relu", "log", "logical_not", "relu", "relu6", "round", "rsqrt", "sigmoid",
    "sign", "silu", "sin", "softplus", "softsign", "sqrt", "square", "tan", "tanh",
}  # fmt: skip
_REDUCING: Final = {
    "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum_square",
    "reduce_l1_norm", "reduce_l2_norm", "reduce_log_sum", "reduce_log_sum_exp",
}  # fmt: skip


@kind(*SPREADING)
def _spread(call: Call) -> Layout:
    return together(call.all_given(), call.count)


@kind(*_ALIKE)
def _alike(call: Call) -> Layout:
    return call.given()


@kind(*_REDUCING)
def _reduce(call: Call) -> Layout:
    x = call.given()
    axes = call.ints("axes", range(len(x.axes)))
    return reduced(x, axes, keep=bool(call.ints("keep_dims", [0])[0]))


@kind("softmax")
def _softmax(call: Call) -> Layout:
    return normed(call.given(), call.ints("axis", [-1]))


@kind("layer_norm")
def _layer_norm(call: Call) -> Layout:
    x = call.given()
    return normed(x, call.ints("axes", range(len(x.axes))))


@kind("l2_norm")
def _l2_norm(call: Call) -> Layout:
    return normed(call.given(), (-1, -2, -3))


@kind("argsort", "cumsum", "topk")
def _ordered(call: Call) -> list[Layout]:
    x = call.given()
    axis = call.ints("axis", [-1])[0] % len(x.axes)
    if x.axes[axis].rows:
        raise Mixed(f"goes over the rows of {x}")
    return [
        replace(x, axes=(*x.axes[:axis], *plain(shape[axis : axis + 1]).axes, *x.axes[axis + 1 :]))
        for shape in call.declared
    ]


@kind("matmul")
def _matmul(call: Call) -> Layout:
    x, y = call.given(), call.given("y")
    if min(len(x.axes), len(y.axes)) < 2:
        raise Unfollowed(f"multiplies {x} and {y}")
    *x_batch, left, x_sum = _turned(x, call.ints("transpose_x", [0])[0])
    *y_batch, y_sum, right = _turned(y, call.ints("transpose_y", [0])[0])
    contracted(x_sum, y_sum, constant=x.constant or y.constant)
    batch = together([replace(x, axes=tuple(x_batch)), replace(y, axes=tuple(y_batch))], call.count)
    return Layout((*batch.axes, left, right))


def _turned(layout: Layout, turned: int) -> tuple[Axis, ...]:
    *rest, a, b = layout.axes
    return (*rest, b, a) if turned else layout.axes


@kind("linear")
def _linear(call: Call) -> Layout:
    x, weight = call.given(), call.given("weight")
    contracted(x.axes[-1], weight.axes[-1], constant=weight.constant)
    return Layout((*x.axes[:-1], weight.axes[0]))


@kind("conv")
def _conv(call: Call) -> Layout:
    """A window of more than one row may only look back."""
    x, weight = call.given(), call.given("weight")
    batch, channels, *places = x.axes
    if weight.rows:
        raise Unfollowed(f"has the weights {weight}")
    if channels.rows:
        raise Mixed(f"sums the channels of {x}, which hold rows")
    if not any(axis.rows for axis in places):
        return Layout((batch, *plain(call.declared[0][1:]).axes))
    count = len(places)
    stride = call.ints("strides", [1] * count)
    dilation = call.ints("dilations", [1] * count)
    custom = call.text("pad_type", "valid") == "custom"
    pad = call.ints("pad", [0] * 2 * count) if custom else [0] * 2 * count
    axes = [batch, weight.axes[0]]
    for n, axis in enumerate(places):
        reach = (weight.axes[2 + n].before - 1) * dilation[n]
        if axis.rows and (stride[n] != 1 or (pad[2 * n], pad[2 * n + 1]) != (reach, 0)):
            raise Unfollowed(f"has a window of rows of {x} that is not of those before")
        axes.append(axis if axis.rows else plain(call.declared[0][2 + n : 3 + n]).axes[0])
    return Layout(tuple(axes))


@kind("scaled_dot_product_attention")
def _attention(call: Call) -> Layout:
    query, key, value = (call.given(one) for one in ("query", "key", "value"))
    contracted(query.axes[-1], key.axes[-1])
    contracted(key.axes[-2], value.axes[-2])
    batch = together([replace(one, axes=one.axes[:-2]) for one in (query, key, value)], call.count)
    scores = Layout((*batch.axes, query.axes[-2], key.axes[-2]))
    if "attn_mask" in call.op.inputs:
        scores = together([scores, call.given("attn_mask")], call.count)
    normed(scores, [-1])
    return Layout((*batch.axes, query.axes[-2], value.axes[-1]))
