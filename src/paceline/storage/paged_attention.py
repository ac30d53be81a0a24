"""OpenVINO's PagedAttention as a graph node: attention over keys and values in blocks of 32 slots.

OpenVINO 2026.4 has no function that makes the operation; its 28 inputs are those of the graphs that
`paged_attention_transformation` writes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SEQUENCES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
"""Inputs that describe the sequences of a call, int32."""


class PagedSizes(NamedTuple):
    """Heads of keys and values, and their sizes."""

    kv_heads: int
    key_size: int
    value_size: int


def paged_attention(
    rows: Sequence[Any],
    caches: Sequence[Any],
    sequences: Sequence[Any],
    longest: Any,
    sizes: PagedSizes,
    *,
    scale: float,
    window: int = 0,
    sinks: npt.NDArray[np.float32] | None = None,
) -> Any:
    """Output [rows, heads * value_size] of causal attention.

    Args:
        rows: queries, keys and values of the call's rows, [rows, heads * size] each.
        caches: keys and values, of a type and shape that the plugin chooses.
        sequences: the inputs named `SEQUENCES`.
        longest: the longest context of the call, int32 scalar.
        sizes: of keys and values.
        scale: factor of the scores.
        window: the sliding window in tokens; 0: none.
        sinks: a logit for each head of queries, [1, heads, 1, 1]; None: none.
    """
    from openvino import opset13
    from openvino.op import _PagedAttentionExtension

    none, off = np.zeros(0, np.int32), np.int32(0)
    given = [
        *(np.float32(scale), np.int32(window)),
        np.zeros(0, np.float32),  # ALiBi slopes
        longest,
        none,  # score aggregation window
        *(none, none, np.zeros(0, np.float32)),  # rotation of cached keys
        *(np.zeros(0, np.float32), off, off),  # XAttention
        np.zeros((0, 0, 0, 0), np.float32) if sinks is None else sinks,
        *(off, none, none, none),  # adaptive eviction
        *(none, np.zeros(0, np.uint8), none),  # token types, and a mask between the call's rows
    ]
    constants = [
        opset13.constant(each) if isinstance(each, np.ndarray | np.generic) else each
        for each in given
    ]
    nodes = [*rows, *caches, *sequences, *constants]
    paged = _PagedAttentionExtension([node.output(0) for node in nodes])
    about = paged.get_rt_info()
    about["k_head_size"], about["num_k_heads"] = sizes.key_size, sizes.kv_heads
    about["v_head_size"], about["num_v_heads"] = sizes.value_size, sizes.kv_heads
    return paged.output(0)
