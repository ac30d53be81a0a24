"""OpenVINO's PagedAttention as a graph node: attention over keys and values in blocks of 32 slots.

OpenVINO 2026.4 has no function for the operation; its 28 inputs are those of the graphs that
`paged_attention_transformation` writes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

SEQUENCES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
"""Inputs that describe the sequences of a call, int32."""


class PagedSizes(NamedTuple):
    """Heads of an attention and their size."""

    heads: int
    kv_heads: int
    head_dim: int


def paged_attention(
    rows: Sequence[Any],
    caches: Sequence[Any],
    sequences: Sequence[Any],
    longest: Any,
    sizes: PagedSizes,
) -> Any:
    """Output [rows, heads * head_dim] of causal attention, scaled by 1 / sqrt(head_dim).

    Args:
        rows: queries, keys and values of the call's rows, [rows, heads * head_dim] each.
        caches: keys and values, of a type and shape that the plugin chooses.
        sequences: the inputs named `SEQUENCES`.
        longest: the longest context of the call, int32 scalar.
        sizes: of the attention.
    """
    from openvino import opset13
    from openvino.op import _PagedAttentionExtension

    none, off = np.zeros(0, np.int32), np.int32(0)
    parameters = [
        *(np.float32(sizes.head_dim**-0.5), off),  # scale, window
        np.zeros(0, np.float32),  # ALiBi slopes
        longest,
        none,  # score aggregation window
        *(none, none, np.zeros(0, np.float32)),  # rotation of cached keys
        *(np.zeros(0, np.float32), off, off),  # XAttention
        np.zeros((0, 0, 0, 0), np.float32),  # sinks
        *(off, none, none, none),  # adaptive eviction
        *(none, np.zeros(0, np.uint8), none),  # token types, and a mask between the call's rows
    ]
    constants = [
        opset13.constant(value) if isinstance(value, np.ndarray | np.generic) else value
        for value in parameters
    ]
    nodes = [*rows, *caches, *sequences, *constants]
    paged = _PagedAttentionExtension([node.output(0) for node in nodes])
    about = paged.get_rt_info()
    for part in "kv":
        about[f"{part}_head_size"], about[f"num_{part}_heads"] = sizes.head_dim, sizes.kv_heads
    return paged.output(0)
