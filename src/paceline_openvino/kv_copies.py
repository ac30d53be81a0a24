"""Copies KV blocks out of an engine's tensors, and back into them; see `KeepsKV`."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import PrefillTable

Caches = Mapping[str, npt.NDArray[np.float16]]
"""Name -> [KV blocks, ...]."""


def kv_of(table: PrefillTable, size: int, caches: Caches, start: int, stop: int) -> Caches:
    """Copies of the KV of slots [start, stop), which are whole blocks of `size` slots."""
    numbers = table.blocks(0)[start // size : stop // size]
    return {name: cache[numbers] for name, cache in caches.items()}


def extend_kv(table: PrefillTable, size: int, caches: Caches, arrays: Caches) -> None:
    """Append KV blocks of `size` slots to a sequence that ends with a block.

    Raises CacheFull, and ValueError for arrays of another model.
    """
    blocks = len(next(iter(arrays.values()), ()))
    forms = {name: ((blocks, *cache.shape[1:]), cache.dtype) for name, cache in caches.items()}
    if forms != {name: (array.shape, array.dtype) for name, array in arrays.items()}:
        raise ValueError("the KV is of another model")
    if table.length % size:
        raise ValueError(f"a sequence of {table.length} slots does not end with a block")
    rows = blocks * size
    table.reserve(rows)
    numbers = table.blocks(rows)[table.length // size :]
    for name, cache in caches.items():
        cache[numbers] = arrays[name]
    table.ran(Block([0] * rows, 0, prefill=True))
    table.commit(rows)
