"""A small program for each rule of `coreml lint` that breaks it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types

COMMON = {"small", "padding", "flexible"}
"""Rules that every package of a few operations breaks."""


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float16)


X = {"hidden": half(1, 64, 1, 1)}
"""Input of most programs: one row, so that no rule about rows applies."""


@dataclass(frozen=True, eq=False)
class Plant:
    """A program with a fault."""

    rule: str
    build: Callable[..., Any]
    inputs: Mapping[str, np.ndarray] = field(default_factory=lambda: X)
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    flexible: Mapping[str, int] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    """Other rules that the same program breaks."""
    change: Callable[[Any], object] | None = None
    """An edit of the saved specification."""
    where: str | None = None
    """The place that the finding must name."""

    def __str__(self) -> str:
        return self.rule


PLANTS: list[Plant] = []


def plant(rule: str, build: Callable[..., Any], *also: str, **more: Any) -> None:
    PLANTS.append(Plant(rule, build, also=frozenset(also), **more))


def operation(spec: Any, kind: str) -> Any:
    function = spec.mlProgram.functions["main"]
    operations = function.block_specializations[function.opset].operations
    return next(op for op in operations if op.type == kind)


# --- operations

plant(
    "linear",
    lambda mb, hidden: mb.linear(x=hidden, weight=normal(8, 1), name="projection"),
    where="projection",
)
plant("linear", lambda mb, hidden: mb.matmul(x=hidden, y=normal(1, 1, 1, 64)))
plant("topk", lambda mb, hidden: mb.topk(x=hidden, k=2, axis=1)[0], "whole-numbers")
plant(
    "host-operation",
    lambda mb, hidden: mb.gather(x=hidden, indices=np.array([3, 1], np.int32), axis=1),
)
plant("host-operation", lambda mb, hidden: mb.reduce_argmax(x=hidden, axis=1), "whole-numbers")


def branch(mb: Any, hidden: Any) -> Any:
    large = mb.greater(x=mb.reduce_max(x=hidden, keep_dims=False), y=np.float16(0))
    return mb.cond(
        pred=large,
        _true_fn=lambda: mb.mul(x=hidden, y=np.float16(2)),
        _false_fn=lambda: mb.mul(x=hidden, y=np.float16(3)),
    )


plant("control-flow", branch, "unseen-operation")
plant(
    "control-flow", lambda mb, hidden: mb.non_zero(x=hidden), "unknown-operation", "whole-numbers"
)
plant(
    "control-flow",
    lambda mb, hidden, size: mb.reshape(x=hidden, shape=mb.add(x=size, y=np.int32(0))),
    "whole-numbers",
    inputs={**X, "size": np.zeros(2, np.int32)},
)
plant(
    "depthwise",
    lambda mb, hidden: mb.conv(x=hidden, weight=normal(64, 1, 1, 1), groups=64, pad_type="valid"),
)


def unknown(spec: Any) -> None:
    operation(spec, "softmax").type = "softmax_unknown"


plant(
    "unknown-operation",
    lambda mb, hidden: mb.softmax(x=hidden, axis=1, name="weights"),
    change=unknown,
    where="weights",
)
plant("unseen-operation", lambda mb, hidden: mb.mul(x=mb.erf(x=hidden), y=np.float16(2)))

# --- precision

plant(
    "float16",
    lambda mb, hidden: mb.cast(
        x=mb.silu(x=mb.cast(x=hidden, dtype="fp32"), name="wide"), dtype="fp16"
    ),
    "cast",
    where="wide",
)
plant("cast", lambda mb, x: mb.cast(x=x, dtype="fp16"), inputs={"x": np.zeros((1, 8), np.float32)})
plant(
    "whole-numbers",
    lambda mb, hidden, n: [mb.silu(x=hidden), mb.add(x=n, y=np.int32(1))],
    inputs={**X, "n": np.zeros(1, np.int32)},
)
plant(
    "overflow",
    lambda mb, hidden: mb.reduce_mean(x=mb.mul(x=hidden, y=hidden), axes=[1], name="squares"),
    where="squares",
)
plant(
    "overflow",
    lambda mb, hidden: mb.reduce_sum(
        x=mb.pow(x=mb.reshape(x=hidden, shape=[1, 8, 8, 1]), y=np.float16(2)), axes=[1]
    ),
)
plant(
    "overflow",
    lambda mb, hidden: mb.reduce_sum_square(x=mb.add(x=hidden, y=normal(1, 64, 1, 1)), axes=[1]),
    "unseen-operation",
)
plant(
    "infinity",
    lambda mb, hidden: mb.add(
        x=hidden, y=mb.const(val=np.full((1, 64, 1, 1), -np.inf, np.float16), name="mask")
    ),
    where="mask",
)
plant(
    "infinity",
    lambda mb, hidden: mb.clip(x=hidden, alpha=np.float16(0), beta=np.float16(np.inf)),
    "unseen-operation",
)

# --- shapes

plant("rank", lambda mb, hidden: mb.reshape(x=hidden, shape=[1, 2, 4, 8, 1]))
plant("axis-length", lambda mb, mask: mb.silu(x=mask), inputs={"mask": half(1, 1, 1, 16385)})
plant(
    "channels",
    lambda mb, hidden: mb.conv(x=hidden, weight=normal(1, 65537, 1, 1), pad_type="valid"),
    inputs={"hidden": half(1, 65537, 1, 1)},
)
plant("padding", lambda mb, hidden: mb.silu(x=hidden))
plant("flexible", lambda mb, hidden: mb.silu(x=hidden), flexible={"hidden": 2})


def array_of(spec: Any, name: str) -> Any:
    return next(one for one in spec.description.input if one.name == name).type.multiArrayType


def without_bound(spec: Any) -> None:
    array_of(spec, "hidden").shapeRange.sizeRanges[2].upperBound = -1


plant(
    "unbounded",
    lambda mb, hidden: mb.silu(x=hidden),
    flexible={"hidden": 2},
    change=without_bound,
    where="hidden",
)


def with_list(spec: Any) -> None:
    array = array_of(spec, "hidden")
    array.ClearField("shapeRange")
    for rows in (1, 4):
        array.enumeratedShapes.shapes.add(shape=[1, 64, rows, 1])


def kept(mb: Any, hidden: Any, *rest: Any) -> list[Any]:
    *others, state = rest
    old = mb.read_state(input=state)
    mb.coreml_update_state(state=state, value=mb.mul(x=old, y=np.float16(2)))
    return [mb.silu(x=one) for one in (hidden, *others)]


STATE = {"k": (1, 2, 32, 32)}
plant("listed-shapes", kept, states=STATE, flexible={"hidden": 2}, change=with_list, where="hidden")
plant(
    "mixed-inputs",
    lambda mb, hidden, other: [mb.silu(x=hidden), mb.silu(x=other)],
    inputs={**X, "other": half(1, 64, 1, 1)},
    flexible={"hidden": 2, "other": 2},
    change=with_list,
)
plant(
    "mixed-inputs",
    kept,
    inputs={**X, "scale": half(1, 64, 1, 1)},
    states=STATE,
    flexible={"hidden": 2},
)
plant(
    "whole-input",
    lambda mb, ids, k: kept(mb, mb.cast(x=ids, dtype="fp16"), k),
    "cast",
    inputs={"ids": np.zeros((1, 1), np.int32)},
    states=STATE,
    flexible={"ids": 1},
    where="ids",
)

# --- states


def of_float32(spec: Any) -> None:
    spec.description.state[0].type.stateType.arrayType.dataType = 65568  # FLOAT32


plant("state-type", kept, states=STATE, change=of_float32, where="k")
plant("state-width", kept, states={"k": (1, 2, 32, 40)}, where="k")


def many(mb: Any, hidden: Any, *states: Any) -> Any:
    for state in states:
        kept(mb, hidden, state)
    return mb.silu(x=hidden)


plant("state-count", many, states=dict.fromkeys(("k", "v", "window"), (1, 32)))
plant("over-40-states", many, states={f"k{layer}": (1, 32) for layer in range(41)})


def shifted(mb: Any, hidden: Any, window: Any) -> Any:
    old = mb.read_state(input=window)
    rest = mb.slice_by_index(x=old, begin=[0, 0, 1], end=[1, 64, 32])
    row = mb.reshape(x=hidden, shape=[1, 64, 1])
    mb.coreml_update_state(state=window, value=mb.concat(values=[rest, row], axis=2, name="moved"))
    return mb.silu(x=hidden)


plant("state-shift", shifted, states={"window": (1, 64, 32)}, where="moved")


def in_part(mb: Any, hidden: Any, window: Any) -> Any:
    old = mb.read_state(input=window)
    row = mb.reshape(x=hidden, shape=[1, 1, 64])
    new = mb.slice_update(x=old, update=row, begin=[0, 3, 0], end=[1, 4, 64], name="part")
    mb.coreml_update_state(state=window, value=new)
    return mb.silu(x=hidden)


plant("state-part", in_part, states={"window": (1, 32, 64)}, where="part")


def wide_update(spec: Any) -> None:
    operation(spec, "mul").outputs[0].type.tensorType.dataType = 11  # FLOAT32


plant("state-update-type", kept, "float16", states=STATE, change=wide_update)

# --- weights


def convolution(mb: Any, hidden: Any, weight: Any) -> Any:
    return mb.conv(x=hidden, weight=weight, pad_type="valid")


def blocks(mb: Any, hidden: Any) -> Any:
    data = np.zeros((8, 64, 1, 1), np.int8).astype(types.np_int4_dtype)
    return convolution(
        mb,
        hidden,
        mb.constexpr_blockwise_shift_scale(data=data, scale=normal(8, 2, 1, 1), name="blocks"),
    )


def table(mb: Any) -> Any:
    indices = np.zeros((8, 64, 1, 1), np.uint8).astype(types.np_uint4_dtype)
    return mb.constexpr_lut_to_dense(indices=indices, lut=normal(1, 1, 1, 1, 16, 1))


def scaled_table(mb: Any, hidden: Any) -> Any:
    scaled = mb.constexpr_blockwise_shift_scale(data=table(mb), scale=normal(8, 1, 1, 1))
    return convolution(mb, hidden, scaled)


def one_scale(mb: Any, hidden: Any) -> Any:
    data = np.zeros((8, 64, 1, 1), np.int8)
    weight = mb.constexpr_blockwise_shift_scale(
        data=data, scale=normal(1, 1, 1, 1), name="layers_0_experts_gates_0_weight"
    )
    return convolution(mb, hidden, weight)


plant("int4-blocks", blocks, where="blocks")
plant("table-scale", scaled_table)
plant(
    "table-state",
    lambda mb, hidden, k: [convolution(mb, hidden, table(mb)), *kept(mb, hidden, k)],
    states=STATE,
)
plant("expert-scale", one_scale, where="layers_0_experts_gates_0_weight")
plant("small", lambda mb, hidden: mb.silu(x=hidden))


# --- rows; see test_lint_row_order for models


def rows(count: int = 1) -> Mapping[str, np.ndarray]:
    return {"hidden": half(1, 64, count, 1), "rope_cos": half(count, 16)}


FLEXIBLE = {"hidden": 2, "rope_cos": 0}
plant(
    "row-order",
    lambda mb, hidden, rope_cos: [
        mb.reshape(x=hidden, shape=[1, -1, 4, 16], name="by_head"),
        mb.silu(x=rope_cos),
    ],
    inputs=rows(),
    flexible=FLEXIBLE,
    where="by_head",
)
plant(
    "row-order",
    lambda mb, hidden, rope_cos: mb.mul(
        x=mb.transpose(
            x=mb.reshape(x=hidden, shape=[1, 4, 4, 16]), perm=[0, 2, 1, 3], name="by_head"
        ),
        y=rope_cos,
        name="rotated",
    ),
    inputs=rows(4),
    where="rotated",
)
plant(
    "row-order",
    lambda mb, hidden, rope_cos: [
        mb.reshape(x=hidden, shape=[1, 1, -1, 1], name="flat"),
        mb.silu(x=rope_cos),
    ],
    inputs=rows(),
    flexible=FLEXIBLE,
    where="flat",
)
plant(
    "row-order-unknown",
    lambda mb, hidden: mb.reverse(x=hidden, axes=[2], name="backwards"),
    "unknown-operation",
    flexible={"hidden": 2},
    where="backwards",
)
plant("row-order-unknown", lambda mb, x: mb.silu(x=x), inputs={"x": half(1, 64, 4, 1)})


def narrow(spec: Any) -> None:
    made = operation(spec, "silu").outputs[0].type.tensorType.dimensions[2]
    made.constant.size = 1


plant(
    "declared-shape",
    lambda mb, hidden: mb.silu(x=hidden, name="act"),
    flexible={"hidden": 2},
    change=narrow,
    where="act",
)
