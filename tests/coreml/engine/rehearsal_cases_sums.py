"""Sums, extremes, orders and matrices. Operation by operation; see `rehearsal_case.py`."""

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from rehearsal_case import Case, entering, real, weights, whole

CASES: list[Case] = []
case = entering(CASES)

# --- sums, extremes, orders

for name, function in {
    "reduce_sum": lambda x, *a, **k: x.sum(*a, **k),
    "reduce_mean": lambda x, *a, **k: x.mean(*a, **k),
    "reduce_max": lambda x, *a, **k: x.amax(*a, **k),
    "reduce_min": lambda x, *a, **k: x.amin(*a, **k),
    "reduce_sum_square": lambda x, *a, **k: x.square().sum(*a, **k),
    "reduce_l2_norm": lambda x, *a, **k: x.square().sum(*a, **k).sqrt(),
}.items():
    for axes in ([1], [0, -1], [2, 1]):
        for keep in (True, False):
            case(
                name,
                ((3, 40, 5),),
                lambda mb, x, n=name, a=axes, k=keep: getattr(mb, n)(x=x, axes=a, keep_dims=k),
                lambda x, f=function, a=axes, k=keep: f(x, tuple(a), keepdim=k),
                f"{axes}{' kept' if keep else ''}",
            )
    case(
        name,
        ((3, 4),),
        lambda mb, x, n=name: getattr(mb, n)(x=x, keep_dims=True),
        lambda x, f=function: f(x, (0, 1), keepdim=True),
        "all",
    )
case(
    "reduce_prod",
    ((3, 4),),
    lambda mb, x: mb.reduce_prod(x=x, axes=[0], keep_dims=True),
    lambda x: x.prod(0, keepdim=True),
)
case(
    "reduce_argmax",
    ((3, 40),),
    lambda mb, x: mb.reduce_argmax(x=x, axis=1, keep_dims=True),
    lambda x: x.argmax(1, keepdim=True),
)
case(
    "reduce_argmax",
    (real([1, 5, 5], [2, 0, 2]),),
    lambda mb, x: mb.reduce_argmax(x=x, axis=-1, output_dtype="uint16"),
    lambda x: torch.tensor([1, 0]),
    "ties",
)
case("argsort", ((3, 9),), lambda mb, x: mb.argsort(x=x), lambda x: x.argsort(1, descending=True))
case(
    "argsort",
    (whole(3, 1, 3, 2),),
    lambda mb, x: mb.argsort(x=x, ascending=True),
    lambda x: torch.tensor([1, 3, 0, 2]),
    "ties",
)
case("topk", ((3, 9),), lambda mb, x: mb.topk(x=x, k=4), lambda x: tuple(x.topk(4)))
case(
    "topk",
    ((9, 3),),
    lambda mb, x: mb.topk(x=x, k=2, axis=0, ascending=True, return_indices=False),
    lambda x: x.topk(2, 0, largest=False).values,
    "smallest",
)
case(
    "topk",
    ((3, 4),),
    lambda mb, x: mb.topk(x=x, k=4, sort=False, output_indices_dtype="uint16"),
    lambda x: tuple(x.topk(4)),
    "everything",
)
case("cumsum", ((3, 9),), lambda mb, x: mb.cumsum(x=x, axis=1), lambda x: x.cumsum(1))
case(
    "cumsum",
    ((4, 2),),
    lambda mb, x: mb.cumsum(x=x, axis=0, exclusive=True, reverse=True),
    lambda x: x.flip(0).cumsum(0).flip(0) - x,
    "exclusive, from the end",
)
case("softmax", ((3, 40),), lambda mb, x: mb.softmax(x=x), lambda x: x.softmax(-1))
case("softmax", ((3, 40),), lambda mb, x: mb.softmax(x=x, axis=0), lambda x: x.softmax(0), "first")
GAMMA, BETA = weights(6), weights(6)
case(
    "layer_norm",
    ((2, 3, 6),),
    lambda mb, x: mb.layer_norm(x=x, axes=[-1], gamma=GAMMA, beta=BETA, epsilon=0.01),
    lambda x: F.layer_norm(x, (6,), torch.tensor(GAMMA), torch.tensor(BETA), 0.01),
)
case(
    "layer_norm",
    ((2, 3, 6),),
    lambda mb, x: mb.layer_norm(x=x, axes=[1, 2]),
    lambda x: F.layer_norm(x, (3, 6)),
    "two axes",
)
case(
    "l2_norm",
    ((2, 3, 4, 5),),
    lambda mb, x: mb.l2_norm(x=x, epsilon=0.5),
    lambda x: x / (x.square().sum((1, 2, 3), keepdim=True) + 0.5).sqrt(),
)

# --- matrices

for what, given, filters, options, arguments in (
    ("1x1", (1, 24, 4, 1), (10, 24, 1, 1), {}, {}),
    ("1x1 of two", (2, 3, 4), (5, 3, 1), {}, {}),
    ("1x1 in groups", (1, 8, 4, 1), (6, 4, 1, 1), {"groups": 2}, {"groups": 2}),
    ("1x1 with strides", (1, 8, 5, 1), (6, 8, 1, 1), {"strides": [2, 1]}, {"stride": (2, 1)}),
    (
        "depthwise, causal",
        (1, 8, 9),
        (8, 1, 3),
        {"groups": 8, "pad_type": "custom", "pad": [2, 0]},
        {"groups": 8, "causal": True},
    ),
    (
        "depthwise, doubled",
        (1, 4, 9),
        (8, 1, 3),
        {"groups": 4},
        {"groups": 4},
    ),
    ("wide", (2, 24, 9), (7, 24, 3), {"pad_type": "custom", "pad": [1, 1]}, {"padding": 1}),
    ("same", (1, 6, 8, 7), (4, 6, 3, 5), {"pad_type": "same"}, {"padding": (1, 2)}),
    (
        "strides, dilations and groups",
        (1, 6, 12, 11),
        (4, 3, 3, 2),
        {
            "pad_type": "custom",
            "pad": [2, 2, 1, 1],
            "strides": [2, 3],
            "dilations": [2, 1],
            "groups": 2,
        },
        {"padding": (2, 1), "stride": (2, 3), "dilation": (2, 1), "groups": 2},
    ),
):
    filled, offsets = weights(*filters), weights(filters[0])
    for biased in (True, False):

        def convolved(x, w=filled, b=offsets if biased else None, a=arguments):
            a = dict(a)
            if a.pop("causal", False):
                x = F.pad(x, (2, 0))
            function = F.conv1d if x.ndim == 3 else F.conv2d
            return function(x, torch.tensor(w), None if b is None else torch.tensor(b), **a)

        bias = {"bias": offsets} if biased else {}
        case(
            "conv",
            (given,),
            lambda mb, x, w=filled, o=options, b=bias: mb.conv(
                x=x, weight=w, **{"pad_type": "valid", **o, **b}
            ),
            convolved,
            what + (" with bias" if biased else ""),
        )
for ending, (before, after) in {"same": (0, 1), "same_lower": (1, 0)}.items():
    even = weights(4, 3, 2)
    case(
        "conv",
        ((1, 3, 7),),
        lambda mb, x, w=even, e=ending: mb.conv(x=x, weight=w, pad_type=e),
        lambda x, w=even, p=(before, after): F.conv1d(F.pad(x, p), torch.tensor(w)),
        f"even, {ending}",
    )
LINEAR, OFFSET = weights(5, 24), weights(5)
case(
    "linear",
    ((2, 3, 24),),
    lambda mb, x: mb.linear(x=x, weight=LINEAR, bias=OFFSET),
    lambda x: F.linear(x, torch.tensor(LINEAR), torch.tensor(OFFSET)),
)
case(
    "linear",
    ((24,),),
    lambda mb, x: mb.linear(x=x, weight=LINEAR),
    lambda x: F.linear(x, torch.tensor(LINEAR)),
    "one row",
)
for what, one, two, turn in (
    ("plain", (3, 24), (24, 5), {}),
    ("batches", (2, 1, 3, 24), (4, 24, 5), {}),
    ("turned", (2, 24, 3), (2, 5, 24), {"transpose_x": True, "transpose_y": True}),
    ("short", (1, 1, 30, 4), (1, 2, 4, 8), {}),
    ("a vector first", (24,), (24, 5), {}),
):
    case(
        "matmul",
        (one, two),
        lambda mb, x, y, t=turn: mb.matmul(x=x, y=y, **t),
        lambda x, y, t=turn: (
            (x.mT if t.get("transpose_x") else x) @ (y.mT if t.get("transpose_y") else y)
        ),
        what,
    )
FIXED = weights(24, 7)
case(
    "matmul",
    ((3, 24),),
    lambda mb, x: mb.matmul(x=x, y=FIXED),
    lambda x: x @ torch.tensor(FIXED),
    "with a constant",
)
case(
    "scaled_dot_product_attention",
    ((1, 2, 3, 8), (1, 2, 20, 8), (1, 2, 20, 6), (1, 1, 3, 20)),
    lambda mb, q, k, v, m: mb.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m),
    F.scaled_dot_product_attention,
)
case(
    "scaled_dot_product_attention",
    ((1, 3, 8), (1, 20, 8), (1, 20, 8), (1, 3, 20)),
    lambda mb, q, k, v, m: mb.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=mb.greater(x=m, y=0.0)
    ),
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m > 0),
    "mask of bools",
)
case(
    "scaled_dot_product_attention",
    ((1, 3, 8), (1, 20, 8), (1, 20, 8)),
    lambda mb, q, k, v: mb.scaled_dot_product_attention(query=q, key=k, value=v),
    F.scaled_dot_product_attention,
    "no mask",
)
case(
    "einsum",
    ((2, 3, 4, 20), (2, 20, 4, 5)),
    lambda mb, x, y: mb.einsum(values=(x, y), equation="nchw,nwhu->nchu"),
    lambda x, y: torch.einsum("nchw,nwhu->nchu", x, y),
)
case(
    "einsum",
    ((3, 4, 20), (20, 4, 5)),
    lambda mb, x, y: mb.einsum(values=(x, y), equation="chw,whr->chr"),
    lambda x, y: torch.einsum("chw,whr->chr", x, y),
    "three axes",
)
