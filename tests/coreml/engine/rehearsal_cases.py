"""The operations that the converter emits: how MIL builds a case of each, and what torch makes.

`build` gets coremltools' builder and a variable for each input; `expected` gets the inputs as
torch tensors. An input is given by its shape (normally distributed numbers) or by its numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from coremltools.converters.mil.mil import types


@dataclass(frozen=True, eq=False)
class Case:
    op: str
    inputs: tuple[tuple[int, ...] | np.ndarray, ...]
    build: Callable[..., Any]
    expected: Callable[..., Any]
    what: str = ""
    state: tuple[int, ...] | None = None
    """The shape of the state that the case reads or writes, where it does."""

    def __str__(self) -> str:
        return f"{self.op} {self.what}".rstrip()

    def numbers(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [
            rng.normal(size=one).astype(np.float32) if isinstance(one, tuple) else one
            for one in self.inputs
        ]


CASES: list[Case] = []


def case(op: str, *about: Any, **more: Any) -> None:
    CASES.append(Case(op, *about, **more))


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


SOME = np.array([[-3.0, -1.5, -0.5, 0.0], [0.5, 1.0, 2.5, 20.0]], np.float32)
OTHER = np.array([[-2.0, 1.5, 0.5, -0.75], [0.25, -1.0, 2.5, 3.0]], np.float32)
POSITIVE = np.abs(weights(2, 5)) + np.float32(0.1)

# --- number by number

for name, function in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "real_div": torch.div,
    "maximum": torch.maximum,
}.items():
    case(name, (SOME, OTHER), lambda mb, x, y, n=name: getattr(mb, n)(x=x, y=y), function)
case("add", ((2, 3, 1), (3, 4)), lambda mb, x, y: mb.add(x=x, y=y), torch.add, "broadcast")
case("pow", (POSITIVE, (2, 5)), lambda mb, x, y: mb.pow(x=x, y=y), torch.pow)
case("pow", ((3, 4),), lambda mb, x: mb.pow(x=x, y=2.0), lambda x: x**2, "square")
for name, function in {
    "abs": torch.abs,
    "sign": torch.sign,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "identity": torch.clone,
}.items():
    case(name, (SOME,), lambda mb, x, n=name: getattr(mb, n)(x=x), function)
case(
    "rsqrt",
    (POSITIVE,),
    lambda mb, x: mb.rsqrt(x=x, epsilon=0.5),
    lambda x: torch.rsqrt(x + 0.5),
    "epsilon",
)
case(
    "clip", (SOME,), lambda mb, x: mb.clip(x=x, alpha=-1.0, beta=0.75), lambda x: x.clamp(-1, 0.75)
)
case("cast", (SOME,), lambda mb, x: mb.cast(x=x, dtype="int32"), lambda x: x.int())

# --- places

case(
    "transpose",
    ((2, 3, 4),),
    lambda mb, x: mb.transpose(x=x, perm=[2, 0, -2]),
    lambda x: x.permute(2, 0, 1),
)
for shape, given, made in (
    ([3, -1], (2, 3, 4), (3, 8)),
    ([1, 0, -1, 0], (2, 50), (1, 1, 2, 50)),
    ([0, 0, 2, 2], (2, 3, 4, 1), (2, 3, 2, 2)),
):
    case(
        "reshape",
        (given,),
        lambda mb, x, s=shape: mb.reshape(x=x, shape=s),
        lambda x, s=made: x.reshape(s),
        str(shape),
    )
case(
    "expand_dims",
    ((2, 3),),
    lambda mb, x: mb.expand_dims(x=x, axes=[0, -1]),
    lambda x: x[None, ..., None],
)
case("squeeze", ((1, 3, 1),), lambda mb, x: mb.squeeze(x=x, axes=[-1]), lambda x: x[..., 0])
case(
    "concat",
    ((2, 3), (2, 1)),
    lambda mb, x, y: mb.concat(values=[x, y, np.ones((2, 2), np.float32)], axis=-1),
    lambda x, y: torch.cat([x, y, torch.ones(2, 2)], -1),
)
for options, sizes in (({"num_splits": 3}, 2), ({"split_sizes": [1, 5]}, [1, 5])):
    case(
        "split",
        ((2, 6),),
        lambda mb, x, o=options: mb.split(x=x, axis=-1, **o),
        lambda x, s=sizes: torch.split(x, s, 1),
        *options,
    )
case("tile", ((2, 3),), lambda mb, x: mb.tile(x=x, reps=[2, 3]), lambda x: x.tile(2, 3))
NO, YES = False, True
for what, options, part in (
    ("negative", {"begin": [-3, 1, 0], "end": [-1, -1, 9]}, np.s_[-3:-1, 1:-1, 0:9]),
    (
        "strides",
        {"begin": [0, 4, 0], "end": [4, 0, 6], "stride": [2, -2, 3]},
        np.s_[0:4:2, 4:0:-2, 0:6:3],
    ),
    (
        "masks",
        {
            "begin": [1, 3, 2],
            "end": [2, 1, 4],
            "begin_mask": [YES, NO, NO],
            "end_mask": [YES, YES, NO],
            "squeeze_mask": [NO, NO, YES],
        },
        np.s_[:, 3:, 2],
    ),
):
    case(
        "slice_by_index",
        ((4, 5, 6),),
        lambda mb, x, o=options: mb.slice_by_index(x=x, **o),
        lambda x, p=part: torch.from_numpy(x.numpy()[p].copy()),
        what,
    )


def updated(x: torch.Tensor, part: Any, update: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[part] = update
    return x


for what, shape, options, part in (
    ("", (4, 2, 6), {"begin": [0, 1, 0], "end": [0, 3, 6], "end_mask": [YES, NO, NO]}, (1, 3)),
    ("one row", (4, 6), {"begin": [0, 2, 0], "end": [4, 0, 6], "squeeze_mask": [NO, YES, NO]}, 2),
):
    case(
        "slice_update",
        ((4, 5, 6), shape),
        lambda mb, x, u, o=options: mb.slice_update(x=x, update=u, **o),
        lambda x, u, p=part: updated(x, np.s_[:, slice(*p) if isinstance(p, tuple) else p], u),
        what,
    )

# --- sums and matrices

for name, function in {
    "reduce_sum": lambda x, *a, **k: x.sum(*a, **k),
    "reduce_mean": lambda x, *a, **k: x.mean(*a, **k),
    "reduce_max": lambda x, *a, **k: x.amax(*a, **k),
}.items():
    for axes, keep in (([1], True), ([0, -1], False)):
        case(
            name,
            ((3, 40, 5),),
            lambda mb, x, n=name, a=axes, k=keep: getattr(mb, n)(x=x, axes=a, keep_dims=k),
            lambda x, f=function, a=axes, k=keep: f(x, tuple(a), keepdim=k),
            f"{axes}{' kept' if keep else ''}",
        )
case("softmax", ((3, 40),), lambda mb, x: mb.softmax(x=x, axis=0), lambda x: x.softmax(0), "first")
for what, groups, bias in (("", 1, None), ("with bias", 1, weights(10)), ("in groups", 2, None)):
    filters = weights(10, 24 // groups, 1, 1)
    options = {} if bias is None else {"bias": bias}
    case(
        "conv",
        ((2, 24, 4, 1),),
        lambda mb, x, w=filters, g=groups, o=options: mb.conv(
            x=x, weight=w, pad_type="valid", groups=g, **o
        ),
        lambda x, w=filters, g=groups, o=options: F.conv2d(
            x, torch.tensor(w), groups=g, **{name: torch.tensor(b) for name, b in o.items()}
        ),
        what,
    )
for what, one, two, turn in (
    ("plain", (3, 24), (24, 5), False),
    ("batches", (2, 1, 3, 24), (4, 24, 5), False),
    ("turned", (2, 24, 3), (2, 5, 24), True),
    ("short", (1, 1, 30, 4), (1, 2, 4, 8), False),
):
    case(
        "matmul",
        (one, two),
        lambda mb, x, y, t=turn: mb.matmul(x=x, y=y, transpose_x=t, transpose_y=t),
        lambda x, y, t=turn: x.mT @ y.mT if t else x @ y,
        what,
    )

# --- constants as they are stored, and states


def added(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """A constant alone would be no program: it is added to the input."""
    return lambda mb, x: mb.add(x=x, y=make(mb))


case("const", ((3,),), added(lambda mb: weights(3)), lambda x: x + torch.tensor(weights(3)))
DATA = np.random.default_rng(3).integers(-128, 128, (4, 6)).astype(np.int8)
for what, scale in (
    ("per tensor", weights(1, 1)),
    ("per channel", weights(4, 1)),
    ("blocks", weights(2, 3)),
):
    case(
        "constexpr_blockwise_shift_scale",
        ((4, 6),),
        added(lambda mb, s=scale: mb.constexpr_blockwise_shift_scale(data=DATA, scale=s)),
        lambda x, s=scale: (
            x + torch.tensor(DATA * np.kron(s, np.ones((4 // s.shape[0], 6 // s.shape[1]))))
        ).float(),
        what,
    )
TABLES = weights(2, 3, 16, 1)  # two along the first axis, three along the second
PLACES = np.random.default_rng(4).integers(0, 16, (8, 9)).astype(np.uint8)
ROW, COLUMN = np.ogrid[:8, :9]
case(
    "constexpr_lut_to_dense",
    ((8, 9),),
    added(
        lambda mb: mb.constexpr_lut_to_dense(
            indices=PLACES.astype(types.np_uint4_dtype), lut=TABLES
        )
    ),
    lambda x: x + torch.tensor(TABLES[ROW // 4, COLUMN // 3, PLACES, 0]),
)
case(
    "read_state",
    ((2, 4),),
    lambda mb, x, s: mb.add(x=mb.cast(x=mb.read_state(input=s), dtype="fp32"), y=x),
    lambda x, s: x + s,
    state=(2, 4),
)
case(
    "write_state",
    (SOME,),
    lambda mb, x, s: mb.cast(
        x=mb.coreml_update_state(state=s, value=mb.cast(x=x, dtype="fp16")), dtype="fp32"
    ),
    lambda x, s: x,
    state=(2, 4),
)
