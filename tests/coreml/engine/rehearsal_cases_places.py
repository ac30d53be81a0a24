"""Numbers that stay in their places, or move. Operation by operation; see `rehearsal_case.py`."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from rehearsal_case import OTHER, POSITIVE, SOME, Case, entering, whole

CASES: list[Case] = []
case = entering(CASES)

# --- number by number


for name, function in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "real_div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "floor_div": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "mod": torch.remainder,
}.items():
    case(name, (SOME, OTHER), lambda mb, x, y, n=name: getattr(mb, n)(x=x, y=y), function)
case("add", ((2, 3, 1), (3, 4)), lambda mb, x, y: mb.add(x=x, y=y), torch.add, "broadcast")
for name, function in {
    "floor_div": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "mod": torch.remainder,
    "add": torch.add,
}.items():
    numbers = (whole(-7, -6, 5, 7), whole(2, -4, 3, -2))
    case(name, numbers, lambda mb, x, y, n=name: getattr(mb, n)(x=x, y=y), function, "whole")
case("pow", (POSITIVE, (2, 5)), lambda mb, x, y: mb.pow(x=x, y=y), torch.pow)
case("pow", ((3, 4),), lambda mb, x: mb.pow(x=x, y=2.0), lambda x: x**2, "square")
case("pow", (POSITIVE,), lambda mb, x: mb.pow(x=x, y=-0.5), lambda x: x**-0.5, "root")

for name, function in {
    "abs": torch.abs,
    "square": torch.square,
    "sign": torch.sign,
    "floor": torch.floor,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu": F.relu,
    "softplus": F.softplus,
    "gelu": F.gelu,
}.items():
    case(name, (SOME,), lambda mb, x, n=name: getattr(mb, n)(x=x), function)
case("sqrt", (POSITIVE,), lambda mb, x: mb.sqrt(x=x), torch.sqrt)
case(
    "rsqrt",
    (POSITIVE,),
    lambda mb, x: mb.rsqrt(x=x, epsilon=0.5),
    lambda x: torch.rsqrt(x + 0.5),
    "epsilon",
)
case("rsqrt", (POSITIVE,), lambda mb, x: mb.rsqrt(x=x), torch.rsqrt)
case("log", (POSITIVE,), lambda mb, x: mb.log(x=x), torch.log)
case("log", (POSITIVE,), lambda mb, x: mb.log(x=x, epsilon=1.0), torch.log1p, "epsilon")
case("inverse", (POSITIVE,), lambda mb, x: mb.inverse(x=x, epsilon=0.25), lambda x: 1 / (x + 0.25))
for mode, approximate in {
    "TANH_APPROXIMATION": lambda x: F.gelu(x, approximate="tanh"),
    "SIGMOID_APPROXIMATION": lambda x: x * torch.sigmoid(1.702 * x),
    "EXACT": F.gelu,
}.items():
    case("gelu", (SOME,), lambda mb, x, m=mode: mb.gelu(x=x, mode=m), approximate, mode)
case(
    "clip",
    (SOME,),
    lambda mb, x: mb.clip(x=x, alpha=-1.0, beta=0.75),
    lambda x: x.clamp(-1.0, 0.75),
)

for name, function in {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
}.items():
    case(name, (SOME, OTHER), lambda mb, x, y, n=name: getattr(mb, n)(x=x, y=y), function)
for name, function in {
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}.items():
    case(
        name,
        (SOME, OTHER),
        lambda mb, x, y, n=name: getattr(mb, n)(x=mb.greater(x=x, y=0.0), y=mb.less(x=y, y=0.5)),
        lambda x, y, f=function: f(x > 0, y < 0.5),
    )
case(
    "logical_not",
    (SOME,),
    lambda mb, x: mb.logical_not(x=mb.greater(x=x, y=0.0)),
    lambda x: ~(x > 0),
)
case(
    "select",
    (SOME, OTHER),
    lambda mb, x, y: mb.select(cond=mb.greater(x=x, y=y), a=x, b=y),
    lambda x, y: torch.where(x > y, x, y),
)
case("cast", (SOME,), lambda mb, x: mb.cast(x=x, dtype="int32"), lambda x: x.int(), "to whole")
case("cast", (whole(1, -2),), lambda mb, x: mb.cast(x=x, dtype="fp32"), lambda x: x, "to real")
case("cast", (SOME,), lambda mb, x: mb.cast(x=x, dtype="bool"), lambda x: x != 0, "to bool")
case("identity", (SOME,), lambda mb, x: mb.identity(x=x), lambda x: x)

# --- shapes, places, parts

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
case("squeeze", ((1, 3, 1),), lambda mb, x: mb.squeeze(x=x), torch.squeeze, "all")
case(
    "concat",
    ((2, 3), (2, 1)),
    lambda mb, x, y: mb.concat(values=[x, y], axis=-1),
    lambda x, y: torch.cat([x, y], -1),
)
case(
    "concat",
    ((2, 3), (2, 3)),
    lambda mb, x, y: mb.concat(values=[x, y], axis=0, interleave=True),
    lambda x, y: torch.stack([x, y], 1).reshape(4, 3),
    "interleaved",
)
case(
    "concat",
    ((2, 3),),
    lambda mb, x: mb.concat(values=[x, np.ones((1, 3), np.float32)], axis=0),
    lambda x: torch.cat([x, torch.ones(1, 3)]),
    "with a constant",
)
case(
    "stack",
    ((2, 3), (2, 3)),
    lambda mb, x, y: mb.stack(values=[x, y], axis=1),
    lambda x, y: torch.stack([x, y], 1),
)
case(
    "split",
    ((2, 6),),
    lambda mb, x: mb.split(x=x, num_splits=3, axis=1),
    lambda x: torch.split(x, 2, 1),
)
case(
    "split",
    ((2, 6),),
    lambda mb, x: mb.split(x=x, split_sizes=[1, 5], axis=-1),
    lambda x: torch.split(x, [1, 5], 1),
    "sizes",
)
case("tile", ((2, 3),), lambda mb, x: mb.tile(x=x, reps=[2, 3]), lambda x: x.tile(2, 3))
GRID = (4, 5, 6)
for what, options, part in (
    ("plain", {"begin": [1, 0, 2], "end": [3, 5, 6]}, np.s_[1:3, 0:5, 2:6]),
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
            "begin_mask": [True, False, False],
            "end_mask": [True, True, False],
            "squeeze_mask": [False, False, True],
        },
        np.s_[:, 3:, 2],
    ),
    (
        "backwards",
        {
            "begin": [0, 0, 0],
            "end": [0, 0, 0],
            "stride": [-1, 1, 1],
            "begin_mask": [True] * 3,
            "end_mask": [True] * 3,
        },
        np.s_[::-1],
    ),
):
    case(
        "slice_by_index",
        (GRID,),
        lambda mb, x, o=options: mb.slice_by_index(x=x, **o),
        lambda x, p=part: torch.from_numpy(x.numpy()[p].copy()),
        what,
    )
case(
    "slice_by_index",
    (GRID, whole(1, 0, 0), whole(2, 5, 6)),
    lambda mb, x, b, e: mb.slice_by_index(x=x, begin=b, end=e),
    lambda x, b, e: x[1:2],
    "that is computed",
)
case(
    "slice_by_size",
    (GRID,),
    lambda mb, x: mb.slice_by_size(x=x, begin=[1, -2, 0], size=[2, 2, -1]),
    lambda x: x[1:3, -2:],
)


def updated(x: torch.Tensor, part: Any, update: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[part] = update
    return x


case(
    "slice_update",
    (GRID, (4, 2, 6)),
    lambda mb, x, u: mb.slice_update(
        x=x,
        update=u,
        begin=[0, 1, 0],
        end=[0, 3, 6],
        end_mask=[True, False, False],
        begin_mask=[True, False, False],
    ),
    lambda x, u: updated(x, np.s_[:, 1:3], u),
)
case(
    "slice_update",
    (GRID, (4, 6)),
    lambda mb, x, u: mb.slice_update(
        x=x,
        update=u,
        begin=[0, 2, 0],
        end=[4, 0, 6],
        squeeze_mask=[False, True, False],
    ),
    lambda x, u: updated(x, np.s_[:, 2], u),
    "one row",
)
case(
    "gather",
    ((5, 3), whole([4, 0], [1, 1])),
    lambda mb, x, i: mb.gather(x=x, indices=i, axis=0),
    lambda x, i: x[i.long()],
)
case(
    "gather",
    ((2, 5, 3), whole([4, 0], [1, 1])),
    lambda mb, x, i: mb.gather(x=x, indices=i, axis=1, batch_dims=1, validate_indices=True),
    lambda x, i: torch.stack([x[0][i[0].long()], x[1][i[1].long()]]),
    "batches",
)
case(
    "gather",
    ((5, 3), whole(2)),
    lambda mb, x, i: mb.gather(x=x, indices=i, axis=-1),
    lambda x, i: x[:, i.long()],
    target="iOS16",
)
case(
    "gather_along_axis",
    ((2, 5), whole([4, 0, 0], [1, 1, 3])),
    lambda mb, x, i: mb.gather_along_axis(x=x, indices=i, axis=1),
    lambda x, i: torch.gather(x, 1, i.long()),
)
case(
    "range_1d",
    (whole(2), whole(11)),
    lambda mb, x, y: mb.range_1d(start=mb.squeeze(x=x), end=mb.squeeze(x=y), step=np.int32(3)),
    lambda x, y: torch.arange(2, 11, 3),
)
case("shape", ((2, 3, 4),), lambda mb, x: mb.shape(x=x), lambda x: torch.tensor([2, 3, 4]))
case(
    "fill",
    (whole(2, 3),),
    lambda mb, x: mb.reshape(x=mb.fill(shape=x, value=1.5), shape=[2, 3]),
    lambda x: torch.full((2, 3), 1.5),
)
case(
    "fill_like",
    ((2, 3),),
    lambda mb, x: mb.fill_like(ref_tensor=x, value=2.0),
    lambda x: torch.full((2, 3), 2.0),
)
case(
    "one_hot",
    (whole(2, 0, 3),),
    lambda mb, x: mb.one_hot(indices=x, one_hot_vector_size=5, on_value=2.0, off_value=-1.0),
    lambda x: F.one_hot(x.long(), 5) * 3.0 - 1,
)
case(
    "one_hot",
    (whole(2, 0, 3),),
    lambda mb, x: mb.one_hot(indices=x, one_hot_vector_size=5, axis=0),
    lambda x: F.one_hot(x.long(), 5).T,
    "first axis",
)
case(
    "band_part",
    ((2, 5, 6),),
    lambda mb, x: mb.band_part(x=x, lower=1, upper=2),
    lambda x: x.triu(-1).tril(2),
)
case("band_part", ((5, 6),), lambda mb, x: mb.band_part(x=x, lower=-1, upper=0), torch.tril, "low")
case(
    "pad",
    ((2, 3, 4),),
    lambda mb, x: mb.pad(x=x, pad=[1, 0, 2, 3], constant_val=7.0),
    lambda x: F.pad(x, (2, 3, 1, 0), value=7.0),
)
