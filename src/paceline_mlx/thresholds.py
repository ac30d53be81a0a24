"""Numbers of keys at which MLX's attention takes another kernel, and how calls stay clear of them.

MLX picks the kernel by the keys of the whole call, padding included. A row at position 1020 has
1,021 keys in a call of its own, but 1,024 in a block of four, where large chips begin to use two
passes. So calls are cut there (`RowRange.split`), and the kernel of a row depends on its position,
however it is computed.

Independent of MLX. Invariant: `dropped` is a function of the position alone.
"""

CAPACITIES = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Keys of every call on a device that plans each shape anew, as cuDNN does for attention: the first
of these numbers that holds the call, the rest masked."""

THRESHOLDS = (*sorted({1024, 4096, 8192, 16384, 65536} | {keys + 1 for keys in CAPACITIES}),)
"""Least keys of another kernel, or of another number of parts in which one sums its keys, on any
chip. 4097 is that of softmax, for attention without a kernel of its own; others are those after
`CAPACITIES`, or in `mlx/backend/metal/scaled_dot_product_attention.cpp` (MLX 0.32.4, read
2026-11-25)."""

MOST_ROWS = 32
"""Most rows of a call whose logits are read."""

BACK = 256
"""Slots kept before a sliding window, so that a sequence can be rewound by nearly that many."""

_STEPS = (256, 128)
"""Slots that a sliding window drops at once. Kernels deal their keys out to 32 to 256 sums in turn,
so these multiples keep a key in its sum; 128 do below 1,024 slots, where there are 32 sums."""

FEW_ROWS = (8, 256)
"""Rows of every call on such a device, of an answer and of a prompt; the rest are padding. On an
H100 8 rows of a 1.7B cost what 2 do in bfloat16, and 1.2 times that in 4 bits (2026-11-26)."""


def capacity(keys: int) -> int:
    """Keys of a call with padding, if `keys` are in use."""
    longest = CAPACITIES[-1]
    return next((slots for slots in CAPACITIES if slots >= keys), -(-keys // longest) * longest)


def drop_step(window: int) -> int | None:
    """Slots that a sliding window drops at once, so that the slots it holds span no threshold.

    None if no step does that.
    """
    for step in _STEPS:
        keys = range(min_held(window) + 2, window + BACK + step + MOST_ROWS)
        if not any(threshold in keys for threshold in THRESHOLDS):
            return step
    return None


def min_held(window: int) -> int:
    """Fewest slots that a sliding window may hold after slots were dropped.

    With the next row they are two more than the window: one of a power of two slots then has more
    keys than the threshold there and the one after it.
    """
    return window + 1


def dropped(window: int, position: int) -> int:
    """Slots that a sliding window has dropped before a call that begins at a position."""
    step = drop_step(window) or _STEPS[0]
    return max(position - window - BACK, 0) // step * step
