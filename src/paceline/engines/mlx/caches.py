"""The caches of mlx-lm by what they can do: those with slots are trimmed, the others put back.

Knows mlx-lm's cache classes, and nothing of sequences or blocks. One is not used as it is: a
`RotatingKVCache` moves its oldest keys as blocks come, so that a row's sums would be taken in
another order for another block; `Sliding` stands in for it.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.engines.mlx.hooks import Array
from paceline.errors import ModelError

SLOTS = 64
"""Slots by which caches grow. mlx-lm's own step is 256, more than many a sequence needs."""

_STEP = 256
"""Slots are dropped in multiples of so many, which leaves the order of a row's sums as it is."""

_BACK = 256
"""Slots that are kept behind a window, so that a sequence can be rewound by as many."""


class Sliding:
    """Keys and values of the last positions, for a layer that looks at no others.

    A `KVCache` of which the beginning is dropped now and then, between blocks. Positions that are
    held but out of the window are hidden by the mask.
    """

    def __init__(self, window: int) -> None:
        """For a layer that looks at `window` positions, its own included."""
        from mlx_lm.models.cache import KVCache

        self.max_size = window
        self.slots = _growing(KVCache())
        self.front = 0
        """Slots that were dropped."""

    @property
    def offset(self) -> int:
        """The position of the next row."""
        return int(self.front + self.slots.offset)

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add a block; see `KVCache`."""
        found: tuple[Array, Array] = self.slots.update_and_fetch(keys, values)
        return found

    def keys_and_values(self) -> tuple[Array, Array]:
        """What is held, for layers that share it with another."""
        found: tuple[Array, Array] = self.slots.keys_and_values()
        return found

    def make_mask(
        self, rows: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        """What the rows of the next block may look at, as mlx-lm's models ask for it."""
        from mlx_lm.models.cache import create_attention_mask

        window = window_size or self.max_size
        held = self.slots.offset
        bound = window if held + rows > window else None
        return create_attention_mask(rows, held, return_array, bound)

    def drop(self) -> None:
        """Let go of slots that no row can look at any more, nor after a short way back."""
        surplus = (self.slots.offset - self.max_size - _BACK) // _STEP * _STEP
        if surplus > 0:
            keys, values, held = self.slots.state
            kept = [each[..., surplus:held, :] for each in (keys, values)]
            self.slots.state = (*kept, held - surplus)
            self.front += surplus

    def can_trim(self, rows: int) -> bool:
        """Whether what the window needs is still held when `rows` are taken away."""
        return not self.front or self.slots.offset - rows >= self.max_size - 1

    def trim(self, rows: int) -> int:
        """Forget the last `rows` slots."""
        return int(self.slots.trim(rows))

    def empty(self) -> bool:
        """Whether nothing was ever added."""
        return bool(self.slots.empty())

    @property
    def state(self) -> Any:
        """The arrays, for those who evaluate them."""
        return self.slots.state

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.slots.nbytes)


def make_caches(model: Any) -> list[Any]:
    """A model's own caches for an empty sequence, of the kinds that are known here.

    Raises:
        ModelError: one cannot be taken back to an earlier position.
    """
    from mlx_lm.models.cache import make_prompt_cache

    made = [_known(cache) for cache in make_prompt_cache(model)]
    for cache in leaves(made):
        if not (is_recurrent(cache) or isinstance(cache, Sliding) or cache.is_trimmable()):
            raise ModelError(
                f"the engine mlx cannot run a {model.model_type}: its {type(cache).__name__} "
                "cannot be taken back to an earlier position"
            )
    return made


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """All caches, those in a `CacheList` one by one."""
    from mlx_lm.models.cache import CacheList

    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def is_recurrent(cache: Any) -> bool:
    """Whether it holds a state that every row changes, rather than slots."""
    from mlx_lm.models.cache import ArraysCache

    return isinstance(cache, ArraysCache)


def can_trim(cache: Any, rows: int) -> bool:
    """Whether a cache with slots can forget its last `rows`."""
    if isinstance(cache, Sliding):
        return cache.can_trim(rows)
    # A chunked cache drops its beginning, too.
    return bool(rows <= cache.offset - getattr(cache, "start_position", 0))


def slot_bytes(caches: Sequence[Any]) -> int:
    """Bytes that a slot takes in all caches together, when each holds something."""
    found = 0
    for cache in leaves(caches):
        if not is_recurrent(cache):
            keys = cache.state[0]
            found += cache.nbytes // keys.shape[2]
    return found


def copied(cache: Any, rows: int) -> Any:
    """A cache that holds the same but for the last `rows` slots, and goes on by itself.

    No array is copied until one of the two is written to.
    """
    from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

    if isinstance(cache, CacheList):
        return CacheList(*(copied(each, rows) for each in cache.caches))
    if isinstance(cache, ArraysCache):
        other: Any = ArraysCache(len(cache.cache))
        other.cache = list(cache.cache)
        return other
    if isinstance(cache, Sliding):
        other = Sliding(cache.max_size)
        other.slots, other.front = copied(cache.slots, rows), cache.front
        return other
    if type(cache) is KVCache:
        other = _growing(KVCache())
        if cache.keys is not None and cache.offset > rows:
            keys, values, held = cache.state
            # An array that is written to changes under all that hold it: others get views.
            kept = [each[..., : held - rows, :] for each in (keys, values)]
            other.state = (*kept, held - rows)
        return other
    other = copy.deepcopy(cache)
    other.trim(rows)
    return other


def _known(cache: Any) -> Any:
    from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

    if isinstance(cache, CacheList):
        return CacheList(*(_known(each) for each in cache.caches))
    if isinstance(cache, RotatingKVCache) and not cache.keep:
        return Sliding(cache.max_size)
    return _growing(cache) if type(cache) is KVCache else cache


def _growing(cache: Any) -> Any:
    cache.step = SLOTS  # of this one, not of its class
    return cache
