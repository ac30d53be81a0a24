"""Rolls recurrent states back to a row of the last block, without running the model again.

The state of a short convolution or a gated delta rule is an `ArraysCache` in mlx-lm. It has no
slots, so rejected rows cannot be trimmed from it. While a block runs, hooks record the calls of
modules that get such a cache, and the outputs of projections inside them.

Rollback restores the state from before the block and calls those modules of mlx-lm again, on the
accepted rows only; their projections return the recorded outputs. MLX is lazy, so only the
recurrence is computed: a convolution over the accepted rows and their state updates, but no
projection, attention, feed-forward layer or head.

Invariant: the state is bit-identical to the one after those rows of the block, even where another
number of rows would change the projections' kernels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx import nn

from paceline_mlx.hooks import ROWS, Args, Array, Call, Kwargs, install_hook, is_rows


@dataclass
class RecordedCall:
    call: Call
    args: Args
    kwargs: Kwargs
    rows: int
    caches: set[int]
    projected: dict[int, list[Array]] = field(default_factory=dict)
    """`id` of a projection inside the module -> the projection's outputs, in order."""
    inner: bool = True
    """False if the module passed its caches to a module inside it."""

    result: Any = None

    @property
    def arrays(self) -> list[Any]:
        """The arrays that a replay needs.

        A projection that is the result is left out: it does not change the state, and may have been
        replaced with one of more rows.
        """
        outputs = [output for outputs in self.projected.values() for output in outputs]
        needed = [output for output in outputs if output is not self.result]
        return [needed, *self.args, *self.kwargs.values()]


class Recorder:
    """A recorder that replays the recurrent layers of one model."""

    def __init__(self, model: Any) -> None:
        """Install hooks on all modules of `model` that could get a cache, and all projections."""
        self._caches: set[int] = set()  # caches whose calls are being recorded
        self._within: list[RecordedCall] = []  # running calls, outermost first
        self._done: list[RecordedCall] = []
        self._replayed: tuple[dict[int, Iterator[Array]], int] | None = None
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.QuantizedLinear):
                install_hook(module, partial(self._projection, id(module)))
            elif module.children():
                install_hook(module, self._module)

    @contextmanager
    def recording(self, caches: Sequence[Any], rows: int) -> Iterator[list[RecordedCall]]:
        """Record the calls that get these caches, for a block of `rows` rows.

        Yields a list that is filled on exit. Blocks of several sequences may be recorded at once.
        """
        own = {id(cache) for cache in caches}
        self._caches |= own
        calls: list[RecordedCall] = []
        try:
            yield calls
        finally:
            calls += [
                call
                for call in self._done
                if call.inner and call.rows == rows and call.caches <= own
            ]
            self._caches -= own
            if not self._caches:
                self._within, self._done = [], []

    def replay(self, recorded: Sequence[RecordedCall], rows: int) -> None:
        """Repeat calls on their first `rows` rows; the caches must hold the state before them."""
        for call in recorded:
            projected = {name: iter(outputs) for name, outputs in call.projected.items()}
            self._replayed = projected, rows
            args = [_first(value, call.rows, rows) for value in call.args]
            kwargs = {name: _first(value, call.rows, rows) for name, value in call.kwargs.items()}
            try:
                call.call(*args, **kwargs)
            finally:
                self._replayed = None

    def _module(self, call: Call, args: Args, kwargs: Kwargs) -> Any:
        arguments = (*args, *kwargs.values())
        cache_ids = self._caches and self._caches & set(map(id, arguments))
        if not cache_ids:
            return call(*args, **kwargs)
        for outer in self._within:
            outer.inner &= not cache_ids & outer.caches
        rows = next((array.shape[ROWS] for array in filter(is_rows, arguments)), 0)
        recorded = RecordedCall(call, args, kwargs, rows, cache_ids)
        self._within.append(recorded)
        recorded.result = call(*args, **kwargs)
        self._done.append(self._within.pop())
        return recorded.result

    def _projection(self, name: int, call: Call, args: Args, kwargs: Kwargs) -> Any:
        if self._replayed is not None and name in self._replayed[0]:
            projected, rows = self._replayed
            return next(projected[name])[:, :rows]
        output = call(*args, **kwargs)
        inside = self._within[-1] if self._within else None
        if inside is not None and output.ndim > ROWS and output.shape[ROWS] == inside.rows:
            inside.projected.setdefault(name, []).append(output)
        return output


def _first(value: Any, of: int, rows: int) -> Any:
    """Return the first `rows` rows of an array with `of` rows; other arguments unchanged."""
    return value[:, :rows] if is_rows(value) and value.shape[ROWS] == of else value
