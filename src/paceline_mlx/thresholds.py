"""Numbers of keys where MLX's attention changes kernels, and how forward passes avoid them.

MLX picks the kernel by the keys of the whole pass, padding included. A row at position 1020 has
1,021 keys in a pass of its own, but 1,024 in a block of four, where large chips switch to a
two-pass kernel. So passes are cut there (`RowRange.split`), and a row's kernel depends only on its
position.

Does not import MLX. Invariant: `dropped` is a function of the position alone.
"""

CAPACITIES = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Padded numbers of keys on a device that plans every new shape, as cuDNN does for attention: a
forward pass uses the first that is large enough, with the rest masked."""

THRESHOLDS = (*sorted({1024, 4096, 8192, 16384, 65536} | {keys + 1 for keys in CAPACITIES}),)
"""Numbers of keys where, on any chip, another kernel begins, or a kernel sums its keys in another
number of parts. 4097 is softmax's, for attention without a fused kernel; others are one above each
of `CAPACITIES`, or from `mlx/backend/metal/scaled_dot_product_attention.cpp` (MLX 0.32.4, read
2026-11-25)."""

MAX_ROWS = 32
"""Maximum rows of a forward pass whose logits are read."""

BACK = 256
"""Slots kept before a sliding window, so that a sequence can be rewound by nearly that number."""

_STEPS = (256, 128)
"""Slots that a sliding window drops at once. Kernels distribute keys round-robin over 32 to 256
partial sums, so dropping a multiple of 256 leaves each key in its sum. Below 1,024 slots there are
32 sums, and 128 is enough."""

FEW_ROWS = (8, 256)
"""Rows of every decode and prefill pass on such a device; unused rows are padding. On an H100, 8
rows of a 1.7B model cost the same as 2 in bfloat16, and 1.2x that in 4 bits (2026-11-26)."""


def capacity(keys: int) -> int:
    """Return the padded number of keys for a pass with `keys` keys."""
    longest = CAPACITIES[-1]
    return next((slots for slots in CAPACITIES if slots >= keys), -(-keys // longest) * longest)


def drop_step(window: int) -> int | None:
    """Return how many slots a sliding window drops at once so that its size crosses no threshold.

    Return None if no step does that.
    """
    for step in _STEPS:
        keys = range(min_held(window) + 2, window + BACK + step + MAX_ROWS)
        if not any(threshold in keys for threshold in THRESHOLDS):
            return step
    return None


def min_held(window: int) -> int:
    """Return the minimum slots that a sliding window holds after dropping some.

    With the next row they are two more than the window. A window of 1,024 then has at least 1,026
    keys, above the thresholds 1,024 and 1,025.
    """
    return window + 1


def dropped(window: int, position: int) -> int:
    """Return the slots that a sliding window has dropped before a pass at `position`."""
    step = drop_step(window) or _STEPS[0]
    return max(position - window - BACK, 0) // step * step
