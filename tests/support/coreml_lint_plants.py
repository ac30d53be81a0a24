"""A small program for each rule of `coreml lint` that breaks it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types

COMMON = {"small", "padding", "flexible"}
"""Rules that every package of a few operations breaks."""

LARGE = {"large", "over-250-mb", "process"}
"""Rules about the size of packages; see test_lint."""


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float16)


X = {"hidden": half(1, 64, 1, 1)}
"""Input of most programs: one row, so that no rule about rows applies."""
STATE = {"k": (1, 2, 32, 32)}
ROWS = {"hidden": half(1, 64, 1, 1), "rope_cos": half(1, 16)}


@dataclass(frozen=True, eq=False)
class Plant:
    """A program with a fault."""

    rule: str
    build: Callable[..., Any]
    inputs: Mapping[str, np.ndarray] = field(default_factory=lambda: X)
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    flexible: Mapping[str, int] = field(default_factory=dict)
    also: str = ""
    """Another rule that the same program breaks."""
    change: Callable[[Any], object] | None = None
    """An edit of the saved specification."""
    where: str | None = None
    """The place that the finding must name."""

    def __str__(self) -> str:
        return self.rule


def operation(spec: Any, kind: str) -> Any:
    function = spec.mlProgram.functions["main"]
    operations = function.block_specializations[function.opset].operations
    return next(op for op in operations if op.type == kind)


def array_of(spec: Any, name: str) -> Any:
    return next(one for one in spec.description.input if one.name == name).type.multiArrayType


def unknown(spec: Any) -> None:
    operation(spec, "softmax").type = "softmax_unknown"


def without_bound(spec: Any) -> None:
    array_of(spec, "hidden").shapeRange.sizeRanges[2].upperBound = -1


def with_list(spec: Any) -> None:
    array = array_of(spec, "hidden")
    array.ClearField("shapeRange")
    for rows in (1, 4):
        array.enumeratedShapes.shapes.add(shape=[1, 64, rows, 1])


def of_float32(spec: Any) -> None:
    spec.description.state[0].type.stateType.arrayType.dataType = 65568  # FLOAT32


def wide_update(spec: Any) -> None:
    operation(spec, "mul").outputs[0].type.tensorType.dataType = 11  # FLOAT32


def narrow(spec: Any) -> None:
    operation(spec, "silu").outputs[0].type.tensorType.dimensions[2].constant.size = 1


def silu(mb: Any, *values: Any) -> list[Any]:
    return [mb.silu(x=value, name=f"act{at}") for at, value in enumerate(values)]


def kept(mb: Any, hidden: Any, *rest: Any) -> list[Any]:
    """Doubles the last value, a state."""
    *others, state = rest
    mb.coreml_update_state(state=state, value=mb.mul(x=mb.read_state(input=state), y=np.float16(2)))
    return silu(mb, hidden, *others)


def many(mb: Any, hidden: Any, *states: Any) -> Any:
    for state in states:
        doubled = kept(mb, hidden, state)
    return doubled


def shifted(mb: Any, hidden: Any, window: Any) -> Any:
    old = mb.read_state(input=window)
    rest = mb.slice_by_index(x=old, begin=[0, 0, 1], end=[1, 64, 32])
    row = mb.reshape(x=hidden, shape=[1, 64, 1])
    mb.coreml_update_state(state=window, value=mb.concat(values=[rest, row], axis=2, name="moved"))
    return silu(mb, hidden)


def in_part(mb: Any, hidden: Any, window: Any) -> Any:
    row = mb.reshape(x=hidden, shape=[1, 1, 64])
    new = mb.slice_update(
        x=mb.read_state(input=window), update=row, begin=[0, 3, 0], end=[1, 4, 64], name="part"
    )
    mb.coreml_update_state(state=window, value=new)
    return silu(mb, hidden)


def branch(mb: Any, hidden: Any) -> Any:
    return mb.cond(
        pred=mb.greater(x=mb.reduce_max(x=hidden, keep_dims=False), y=np.float16(0)),
        _true_fn=lambda: mb.mul(x=hidden, y=np.float16(2)),
        _false_fn=lambda: mb.mul(x=hidden, y=np.float16(3)),
    )


def convolution(mb: Any, hidden: Any, weight: Any) -> Any:
    return mb.conv(x=hidden, weight=weight, pad_type="valid")


def scaled(mb: Any, hidden: Any, data: Any, *scales: int, name: str = "weight") -> Any:
    """A convolution with weights that have scales."""
    weight = mb.constexpr_blockwise_shift_scale(data=data, scale=normal(*scales, 1, 1), name=name)
    return convolution(mb, hidden, weight)


def table(mb: Any) -> Any:
    indices = np.zeros((8, 64, 1, 1), np.uint8).astype(types.np_uint4_dtype)
    return mb.constexpr_lut_to_dense(indices=indices, lut=normal(1, 1, 1, 1, 16, 1))


BYTES = np.zeros((8, 64, 1, 1), np.int8)
FOUR_BITS = BYTES.astype(types.np_int4_dtype)
EXPERT = "layers_0_experts_gates_0_weight"

PLANTS = [
    # operations
    Plant(
        "linear",
        lambda mb, x: mb.linear(x=x, weight=normal(8, 1), name="projection"),
        where="projection",
        also="unknown-operation",
    ),
    Plant("linear", lambda mb, x: mb.matmul(x=x, y=normal(1, 1, 1, 64))),
    Plant("topk", lambda mb, x: mb.topk(x=x, k=2, axis=1)[0], also="whole-numbers"),
    Plant("host-operation", lambda mb, x: mb.reduce_argmax(x=x, axis=1), also="whole-numbers"),
    Plant("control-flow", branch, also="unknown-operation"),
    Plant(
        "control-flow",
        lambda mb, x, size: mb.reshape(x=x, shape=mb.add(x=size, y=np.int32(0))),
        {**X, "size": np.zeros(2, np.int32)},
        also="whole-numbers",
    ),
    Plant(
        "depthwise",
        lambda mb, x: mb.conv(x=x, weight=normal(64, 1, 1, 1), groups=64, pad_type="valid"),
    ),
    Plant(
        "unknown-operation",
        lambda mb, x: mb.softmax(x=x, axis=1, name="weights"),
        change=unknown,
        where="weights",
    ),
    Plant("unseen-operation", lambda mb, x: mb.mul(x=mb.exp(x=x), y=np.float16(2))),
    # precision
    Plant(
        "float16",
        lambda mb, x: mb.cast(x=mb.silu(x=mb.cast(x=x, dtype="fp32"), name="wide"), dtype="fp16"),
        also="cast",
        where="wide",
    ),
    Plant("cast", lambda mb, x: mb.cast(x=x, dtype="fp16"), {"x": np.zeros((1, 8), np.float32)}),
    Plant(
        "whole-numbers",
        lambda mb, x, n: [mb.silu(x=x), mb.add(x=n, y=np.int32(1))],
        {**X, "n": np.zeros(1, np.int32)},
    ),
    Plant(
        "overflow",
        lambda mb, x: mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[1], name="squares"),
        where="squares",
    ),
    Plant(
        "overflow",
        lambda mb, x: mb.reduce_sum(
            x=mb.pow(x=mb.reshape(x=x, shape=[1, 8, 8, 1]), y=np.float16(2)), axes=[1]
        ),
    ),
    Plant(
        "infinity",
        lambda mb, x: mb.add(
            x=x, y=mb.const(val=np.full((1, 64, 1, 1), -np.inf, np.float16), name="mask")
        ),
        where="mask",
    ),
    # shapes
    Plant("rank", lambda mb, x: mb.reshape(x=x, shape=[1, 2, 4, 8, 1])),
    Plant("axis-length", silu, {"mask": half(1, 1, 1, 16385)}),
    Plant(
        "channels",
        lambda mb, x: convolution(mb, x, normal(1, 65537, 1, 1)),
        {"hidden": half(1, 65537, 1, 1)},
    ),
    Plant("padding", silu),
    Plant("flexible", silu, flexible={"hidden": 2}),
    Plant("unbounded", silu, flexible={"hidden": 2}, change=without_bound, where="hidden"),
    Plant("listed-shapes", kept, X, STATE, {"hidden": 2}, change=with_list, where="hidden"),
    Plant(
        "mixed-inputs",
        silu,
        {**X, "other": half(1, 64, 1, 1)},
        flexible={"hidden": 2, "other": 2},
        change=with_list,
    ),
    Plant("mixed-inputs", kept, {**X, "scale": half(1, 64, 1, 1)}, STATE, {"hidden": 2}),
    Plant(
        "whole-input",
        lambda mb, ids, k: kept(mb, mb.cast(x=ids, dtype="fp16"), k),
        {"ids": np.zeros((1, 1), np.int32)},
        STATE,
        {"ids": 1},
        also="cast",
        where="ids",
    ),
    # states
    Plant("state-type", kept, X, STATE, change=of_float32, where="k"),
    Plant("state-width", kept, X, {"k": (1, 2, 32, 40)}, where="k"),
    Plant("state-count", many, X, dict.fromkeys(("k", "v", "window"), (1, 32))),
    Plant("over-40-states", many, X, {f"k{layer}": (1, 32) for layer in range(41)}),
    Plant("state-shift", shifted, X, {"window": (1, 64, 32)}, where="moved"),
    Plant("state-part", in_part, X, {"window": (1, 32, 64)}, where="part"),
    Plant("state-update-type", kept, X, STATE, also="float16", change=wide_update),
    # weights
    Plant(
        "int4-blocks",
        lambda mb, x: scaled(mb, x, FOUR_BITS, 8, 2, name="blocks"),
        where="blocks",
    ),
    Plant("table-scale", lambda mb, x: scaled(mb, x, table(mb), 8, 1)),
    Plant(
        "table-state",
        lambda mb, x, k: [convolution(mb, x, table(mb)), *kept(mb, x, k)],
        X,
        STATE,
    ),
    Plant("expert-scale", lambda mb, x: scaled(mb, x, BYTES, 1, 1, name=EXPERT), where=EXPERT),
    Plant("small", silu),
    # rows; see test_lint_row_order for models
    Plant(
        "row-order",
        lambda mb, x, cos: [mb.reshape(x=x, shape=[1, -1, 4, 16], name="by_head"), *silu(mb, cos)],
        ROWS,
        flexible={"hidden": 2, "rope_cos": 0},
        where="by_head",
    ),
    Plant(
        "row-order",
        lambda mb, x, cos: mb.mul(
            x=mb.transpose(x=mb.reshape(x=x, shape=[1, 4, 4, 16]), perm=[0, 2, 1, 3]),
            y=cos,
            name="rotated",
        ),
        {"hidden": half(1, 64, 4, 1), "rope_cos": half(4, 16)},
        where="rotated",
    ),
    Plant(
        "row-order-unknown",
        lambda mb, x: mb.reverse(x=x, axes=[2], name="backwards"),
        flexible={"hidden": 2},
        also="unknown-operation",
        where="backwards",
    ),
    Plant("declared-shape", silu, flexible={"hidden": 2}, change=narrow, where="act0"),
]
