"""Fill slots that a cache must not read with bytes of 0x3e, numbers of ordinary size."""

from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.engines.base import Engine, KVSequence
from paceline.engines.llamacpp.binding import PARTIAL_STATE

POISON = 0x3E


def poison(engine: Engine, sequence: KVSequence, length: int | None = None) -> None:
    _BY_ENGINE[engine.name](engine, sequence, sequence.length if length is None else length)


def _toy(_: Any, sequence: Any, length: int) -> None:
    sequence.keys[length:] = int.from_bytes(bytes([POISON] * 8))
    sequence.values[length:] = POISON


def _llamacpp(engine: Any, sequence: Any, length: int) -> None:
    # The library's memory is its own: other tokens are computed into the slots.
    places = [(place, 0) for free in engine._contexts._free.values() for place in free]
    if sequence.length and engine._model.recurrent:
        _llamacpp_recurrent(engine, sequence, length)
    elif sequence.length:
        place = sequence.place(POISON)
        place.truncate(length)
        places.append((place, sequence.length))
    for place, kept in places:
        count = kept - place.length if kept > place.length else 0
        place.decode([POISON] * (count + 16), slice(0, 0))
        place.truncate(kept)


def _llamacpp_recurrent(engine: Any, sequence: Any, length: int) -> None:
    """Also the states of the library that are not the sequence's."""
    place, end = sequence.place(POISON), sequence.length
    sequence.prepare(place, lambda block: engine._calls(sequence, place, block))
    if length == end:
        state = place.state(PARTIAL_STATE)
        place.decode([POISON] * 16, slice(0, 0))
        place.restore_recurrent(state, end)
    else:  # it cannot be cut there: all of it
        place.truncate(0)
        place.decode([POISON] * end, slice(0, 0))


def _coreml(engine: Any, sequence: Any, length: int) -> None:
    for state in engine._states_of(sequence) if sequence.length else ():
        for cell in state.cells.values():
            slots = [axis for axis, n in enumerate(cell.array.shape) if n == engine.context_length]
            for axis in slots[:1]:
                np.moveaxis(cell.array, axis, 0)[length:] = np.frombuffer(
                    bytes([POISON] * 4), np.float32
                )[0]


def _mlx(_: Any, sequence: Any, length: int) -> None:
    import mlx.core as mx

    from paceline_mlx.caches import SlidingCache

    def filled(array: Any) -> Any:
        value = mx.array([POISON] * array.dtype.size, mx.uint8).view(array.dtype)
        return mx.broadcast_to(value, array.shape)

    states = sequence.states
    for cache in states._slots:
        held = cache.slots if isinstance(cache, SlidingCache) else cache
        front = cache.front if isinstance(cache, SlidingCache) else 0
        if held.keys is not None:
            for array in (held.keys, held.values):
                rest = array[..., length - front :, :]
                array[..., length - front :, :] = filled(rest)
    if states.held > length:  # it is restored from before the block
        for cache in states._recurrent:
            cache.cache = [None if one is None else filled(one) for one in cache.cache]


_BY_ENGINE: dict[str, Callable[[Any, Any, int], None]] = {
    "toy": _toy,
    "llamacpp": _llamacpp,
    "coreml": _coreml,
    "mlx": _mlx,
}
