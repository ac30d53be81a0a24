"""Whether a model fits the memory of this machine, or of its container."""

from paceline.errors import ModelError
from paceline.models.progress import Progress
from paceline.storage.files import megabytes
from paceline.storage.system import memory_bytes

MEMORY_PER_BYTE = 3.2
"""Bytes of memory that a model takes at its peak, while it is loaded, per byte of its weights,
without the KV cache: 3.32 GB for a 1.7B model in Q4_0 of 1.05 GB
(benchmarks/results/calls-1.7b.json). The weights are copied when the graph is compiled, and packed
once more in the first call."""


def memory_needed(weights: int) -> int:
    """Memory that weights of this many bytes need, about."""
    return int(weights * MEMORY_PER_BYTE)


def fits(weights: int) -> bool:
    """Whether weights of this many bytes fit."""
    return memory_needed(weights) <= memory_bytes()


def check_fits(
    name: str, weights: int, progress: Progress, advice: str = "", *, mapped: bool = False
) -> None:
    """Say so if weights of this many bytes are likely not to fit, before anything is read.

    `advice` is a further way out; `mapped`: whether the engine maps the file and copies nothing.
    Raises ModelError if the weights alone are larger than memory.
    """
    has = megabytes(memory_bytes())
    if weights > memory_bytes():
        raise ModelError(
            f"{name} has {megabytes(weights)}, and this machine has {has} of memory; choose a "
            f"smaller model or quantization{advice}"
        )
    if not mapped and not fits(weights):
        progress.say(
            f"{name} needs about {megabytes(memory_needed(weights))} of memory while it is loaded, "
            f"and this machine has {has}"
        )
