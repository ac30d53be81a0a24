"""Whether a model fits this machine's memory."""

from paceline.storage.memory import memory_bytes

MEMORY_PER_BYTE = 2.4
"""Bytes of memory that a running model takes per byte of its weights, without the KV cache: 2.71 GB
for a 1.7B model in Q4_0 of 1.13 GB (OpenVINO 2026.4.1, measured on 2026-11-22): the weights are
copied when the graph is compiled, and packed once more in the first call."""


def memory_needed(weights: int) -> int:
    """Memory that weights of this many bytes need, about."""
    return int(weights * MEMORY_PER_BYTE)


def fits(weights: int) -> bool:
    """Whether weights of this many bytes fit."""
    return memory_needed(weights) <= memory_bytes()
