"""Constants as they are stored, and states. Operation by operation; see `rehearsal_case.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil.mil import types
from rehearsal_case import SOME, Case, entering, real, weights, whole

CASES: list[Case] = []
case = entering(CASES)

case(
    "const",
    ((3,),),
    lambda mb, x: mb.add(x=x, y=real(1, 2, 3)),
    lambda x: x + torch.tensor([1, 2, 3]),
)


def added(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """A constant alone would be no program: it is added to the input."""
    return lambda mb, x: mb.add(x=x, y=make(mb))


DATA8 = np.random.default_rng(3).integers(-128, 128, (4, 6)).astype(np.int8)
for what, scale, offset in (
    ("per tensor", weights(1, 1), None),
    ("per channel", weights(4, 1), None),
    ("with offsets", weights(4, 1), whole([3], [-5], [0], [127]).astype(np.int8)),
    ("blocks", weights(2, 3), whole([3, 0, 1], [-5, 2, 9]).astype(np.int8)),
):
    options = {"offset": offset} if offset is not None else {}

    def shifted(x, s=scale, o=offset):
        wide = DATA8.astype(np.float32)
        spread = np.ones((4 // s.shape[0], 6 // s.shape[1]), np.float32)
        if o is not None:
            wide = wide - np.kron(o.astype(np.float32), spread)
        return x + torch.tensor(np.kron(s, spread) * wide)

    case(
        "constexpr_blockwise_shift_scale",
        ((4, 6),),
        added(
            lambda mb, s=scale, o=options: mb.constexpr_blockwise_shift_scale(
                data=DATA8, scale=s, **o
            )
        ),
        shifted,
        what,
    )
for shape, axis in (((4,), 0), ((6,), 1)):
    scale, zero = weights(*shape), np.arange(*shape).astype(np.int8)
    wide = [-1 if at == axis else 1 for at in range(2)]
    case(
        "constexpr_affine_dequantize",
        ((4, 6),),
        added(
            lambda mb, s=scale, z=zero, a=axis: mb.constexpr_affine_dequantize(
                quantized_data=DATA8, zero_point=z, scale=s, axis=np.int32(a)
            )
        ),
        lambda x, s=scale, z=zero, w=wide: (
            x
            + torch.tensor(
                s.reshape(w) * (DATA8.astype(np.float32) - z.astype(np.float32).reshape(w))
            )
        ),
        f"axis {axis}",
        target="iOS16",
    )
case(
    "constexpr_cast",
    ((3,),),
    added(
        lambda mb: mb.constexpr_cast(
            source_val=np.array([1.5, 2, 1 / 3], np.float16), output_dtype="fp32"
        )
    ),
    lambda x: x + torch.tensor([1.5, 2, 1 / 3], dtype=torch.float16).float(),
    target="iOS16",
)
TABLE = weights(16)
PLACES = np.random.default_rng(4).integers(0, 16, (5, 3)).astype(np.uint8)
case(
    "constexpr_lut_to_dense",
    ((5, 3),),
    added(
        lambda mb: mb.constexpr_lut_to_dense(
            indices=packed(PLACES, 4), lut=TABLE, shape=np.array([5, 3], np.uint32)
        )
    ),
    lambda x: x + torch.tensor(TABLE[PLACES]),
    target="iOS16",
)
for bits in (1, 2, 3, 4, 6, 8):
    # Two tables along the first axis, three along the second.
    tables = weights(2, 3, 2**bits, 1)
    places = np.random.default_rng(bits).integers(0, 2**bits, (8, 9)).astype(np.uint8)
    short = places.astype(np.uint8 if bits == 8 else getattr(types, f"np_uint{bits}_dtype"))
    row, column = np.ogrid[:8, :9]
    case(
        "constexpr_lut_to_dense",
        ((8, 9),),
        added(lambda mb, i=short, t=tables: mb.constexpr_lut_to_dense(indices=i, lut=t)),
        lambda x, i=places, t=tables, r=row, c=column: x + torch.tensor(t[r // 4, c // 3, i, 0]),
        f"{bits} bits",
    )
VECTORS = weights(1, 1, 4, 2)
for axis in (0, 1):
    corners = np.random.default_rng(axis).integers(0, 4, (3, 4)).astype(np.uint8)
    short = corners.astype(types.np_uint2_dtype)
    long = np.zeros((6, 4) if axis == 0 else (3, 8), np.float32)
    for at in np.ndindex(3, 4):
        for element in range(2):
            there = [at[0], at[1]]
            there[axis] = there[axis] * 2 + element
            long[tuple(there)] = VECTORS[0, 0, corners[at], element]
    case(
        "constexpr_lut_to_dense",
        (long.shape,),
        added(
            lambda mb, i=short, a=axis: mb.constexpr_lut_to_dense(
                indices=i, lut=VECTORS, vector_axis=np.int32(a)
            )
        ),
        lambda x, v=long: x + torch.tensor(v),
        f"vectors along {axis}",
    )
for name, low in {"int4": -8, "uint4": 0}.items():
    for what, shape in {"": (4, 6), " in place": (2, 2)}.items():  # few numbers are no record
        nibbles = np.random.default_rng(6).integers(low, low + 16, shape)
        short = nibbles.astype(getattr(types, f"np_{name}_dtype"))
        case(
            "constexpr_blockwise_shift_scale",
            (shape,),
            added(
                lambda mb, d=short: mb.constexpr_blockwise_shift_scale(
                    data=d, scale=real([0.5, 0.25])
                )
            ),
            lambda x, d=nibbles: (
                x + torch.tensor(d * np.repeat([0.5, 0.25], len(d[0]) // 2), dtype=torch.float32)
            ),
            name + what,
        )
MASK = np.random.default_rng(5).integers(0, 2, (5, 3)).astype(np.uint8)
KEPT = weights(int(MASK.sum()))


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """As MIL packs them: the first in the lowest bits."""
    each = np.unpackbits(numbers.reshape(-1, 1), axis=1, bitorder="little")[:, :bits]
    return np.packbits(each.reshape(-1), bitorder="little")


def sparse(x: torch.Tensor) -> torch.Tensor:
    dense = np.zeros(MASK.shape, np.float32)
    dense[MASK == 1] = KEPT
    return x + torch.tensor(dense)


case(
    "constexpr_sparse_to_dense",
    ((5, 3),),
    added(
        lambda mb: mb.constexpr_sparse_to_dense(
            nonzero_data=KEPT, mask=MASK.astype(types.np_uint1_dtype)
        )
    ),
    sparse,
)
case(
    "constexpr_sparse_to_dense",
    ((5, 3),),
    added(
        lambda mb: mb.constexpr_sparse_to_dense(
            nonzero_data=KEPT, mask=packed(MASK, 1), shape=np.array([5, 3], np.uint32)
        )
    ),
    sparse,
    target="iOS16",
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
