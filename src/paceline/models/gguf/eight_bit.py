"""The default model's GGUF file with its matrices in Q8_0.

ik_llama.cpp computes Q4_1, the type of the file, wrong at some widths
(docs/decisions/row-classes.md). Q8_0 has 32 weights of 8 bits to an f16 scale: finer than what it
is made from, so it is the same model to about 1 part in 250 of a group's largest.
"""

from math import prod
from pathlib import Path
from typing import Any

import numpy.typing as npt

from paceline.models.gguf import read, write_derived
from paceline.models.manifest import GGUF_WEIGHTS, Facts
from paceline.storage.gguf_file import Tensor, write_gguf
from paceline.storage.progress import Progress

_GROUP, _GROUP_BYTES = 32, 34
"""Weights of a group of Q8_0, and its bytes."""


def write_q8(path: Path, work: Path, progress: Progress) -> Facts:
    """Write weights, and what is derived of a file, into `work`. Raises ModelError and OSError."""
    from gguf import GGMLQuantizationType, dequantize, quantize

    eight_bit = GGMLQuantizationType.Q8_0
    source = read(path, progress)
    facts = write_derived(path, source.fields, work)
    forms = {tensor.name: (tensor.kind, tensor.data.nbytes) for tensor in source.tensors}
    for tensor in source.tensors:
        if len(tensor.shape) > 1 and tensor.shape[-1] % _GROUP == 0:
            size = prod(tensor.shape) // _GROUP * _GROUP_BYTES
            forms[tensor.name] = (int(eight_bit), size)

    def values(tensor: Tensor) -> npt.NDArray[Any]:
        if forms[tensor.name][0] == tensor.kind:
            return tensor.data
        weights = dequantize(tensor.data, GGMLQuantizationType(tensor.kind))
        groups: npt.NDArray[Any] = quantize(weights, eight_bit)
        return groups

    total = sum(size for _, size in forms.values())
    with progress.task("storing weights in 8 bits", total) as update:
        write_gguf(work / GGUF_WEIGHTS, source, forms, values, update)
    return facts
