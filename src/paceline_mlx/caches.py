"""mlx-lm's caches by kind: KV caches can be trimmed, recurrent ones restored.

Depends on neither sequences nor blocks. `SlidingCache` replaces mlx-lm's `RotatingKVCache`, which
moves its oldest keys with every block: the order of a row's sums would depend on the block.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from paceline.errors import ModelError
from paceline_mlx.hooks import Array
from paceline_mlx.thresholds import drop_step, dropped, min_held

SLOTS = 64
"""Slots added when a cache grows. mlx-lm's own step is 256, more than many sequences need."""


class SlidingCache:
    """KV cache of a sliding-window layer.

    A `KVCache` whose first slots are dropped between blocks. The mask hides slots that are held but
    outside the window.
    """

    def __init__(self, window: int) -> None:
        """Create a cache for a layer that attends to `window` positions, its own included."""
        self.max_size = window
        self.slots = _growing(KVCache())
        self.front = 0

    @property
    def offset(self) -> int:
        return int(self.front + self.slots.offset)

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        arrays: tuple[Array, Array] = self.slots.update_and_fetch(keys, values)
        return arrays

    def make_mask(
        self, rows: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        window = window_size or self.max_size
        held = self.slots.offset
        bound = window if held + rows > window else None
        return create_attention_mask(rows, held, return_array, bound)

    def drop(self) -> None:
        surplus = dropped(self.max_size, self.offset) - self.front
        if surplus > 0:
            keys, values, held = self.slots.state
            kept = [array[..., surplus:held, :] for array in (keys, values)]
            self.slots.state = (*kept, held - surplus)
            self.front += surplus

    def trim(self, rows: int) -> int:
        return int(self.slots.trim(rows))

    @property
    def state(self) -> Any:
        return self.slots.state

    @property
    def nbytes(self) -> int:
        return int(self.slots.nbytes)


def make_caches(model: Any) -> list[Any]:
    """Return a model's own caches for an empty sequence, with `SlidingCache` for rotating ones.

    Raises ModelError if one of them cannot be rolled back.
    """
    caches = [_supported(cache) for cache in make_prompt_cache(model)]
    for cache in leaves(caches):
        if not (is_recurrent(cache) or isinstance(cache, SlidingCache) or cache.is_trimmable()):
            raise ModelError(
                f"the engine mlx cannot run {model.model_type} models: their "
                f"{type(cache).__name__} cannot be rolled back; choose another engine"
            )
    return caches


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Yield all caches, with `CacheList`s flattened."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def kernel_by_position(cache: Any) -> bool:
    """Return True if a row's position decides which kernel its attention to this cache takes."""
    if isinstance(cache, SlidingCache):
        return drop_step(cache.max_size) is not None
    return type(cache) is KVCache or is_recurrent(cache)


def is_recurrent(cache: Any) -> bool:
    return isinstance(cache, ArraysCache)


def can_trim(cache: Any, rows: int) -> bool:
    if isinstance(cache, SlidingCache):  # the whole window, and a slot or two, must be left
        return not cache.front or int(cache.slots.offset) - rows >= min_held(cache.max_size)
    # A chunked cache also drops its first slots.
    return bool(rows <= cache.offset - getattr(cache, "start_position", 0))


def slot_bytes(caches: Sequence[Any]) -> int:
    """Return the bytes per slot of all caches together; none may be empty."""
    slots = [cache for cache in leaves(caches) if not is_recurrent(cache)]
    return sum(cache.nbytes // cache.state[0].shape[2] for cache in slots)


def copy_without(cache: Any, rows: int) -> Any:
    """Return an independent copy without the last `rows` slots.

    Arrays are copied only when one of the two caches is written.
    """
    if isinstance(cache, CacheList):
        return CacheList(*(copy_without(child, rows) for child in cache.caches))
    if isinstance(cache, ArraysCache):
        other: Any = ArraysCache(len(cache.cache))
        other.cache = list(cache.cache)
        return other
    if isinstance(cache, SlidingCache):
        other = SlidingCache(cache.max_size)
        other.slots, other.front = copy_without(cache.slots, rows), cache.front
        return other
    if type(cache) is KVCache:
        other = _growing(KVCache())
        if cache.keys is not None and cache.offset > rows:
            keys, values, held = cache.state
            # Writes change an array for all its owners, so the copy gets views.
            kept = [array[..., : held - rows, :] for array in (keys, values)]
            other.state = (*kept, held - rows)
        return other
    other = copy.deepcopy(cache)
    other.trim(rows)
    return other


def _supported(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_supported(child) for child in cache.caches))
    if isinstance(cache, RotatingKVCache) and not cache.keep:
        return SlidingCache(cache.max_size)
    return _growing(cache) if type(cache) is KVCache else cache


def _growing(cache: Any) -> Any:
    cache.step = SLOTS  # on the instance, not on the class
    return cache
