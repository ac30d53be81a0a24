"""Recurrences brought back to a row of the last block, without running the model again.

A short convolution's window or a gated-delta state is what mlx-lm calls an `ArraysCache`: it has no
slots, so a state that has seen rejected rows cannot be trimmed. While a block runs, the modules
that are given such a cache are heard, and so are the projections inside them. To go back, the
state from before the block is put back and those modules are called once more, by mlx-lm's own
code, on the accepted rows alone; their projections answer with what they answered before.
MLX computes nothing that nobody asks for, so what is computed again is the recurrence: a
convolution over the accepted rows and a state update for each. Neither a projection nor an
attention, nor a feed-forward layer, nor the head.

As nothing but the recurrence runs again, the state is the one that those rows themselves led to,
whatever the kernels of the projections make of other numbers of rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.engines.mlx.hooks import Array, Hook, install_hook

_ROWS = 1
"""The axis of rows, in [1, T, ...]."""


@dataclass
class RecordedCall:
    """A call of a module that was given a cache without slots."""

    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    rows: int
    caches: set[int]
    """The identities of those caches."""
    projected: dict[int, list[Array]] = field(default_factory=dict)
    """What each projection inside it answered, in order; by the identity of its module."""
    inner: bool = True
    """Whether it gave its caches to no module inside it."""


class Recorder:
    """Hears one model's recurrences."""

    def __init__(self, model: Any) -> None:
        """Hear all modules of `model` that could be given a cache, and all projections."""
        from mlx import nn

        self._caches: set[int] = set()  # those that are recorded now
        self._within: list[RecordedCall] = []  # the calls that are going on, outermost first
        self._done: list[RecordedCall] = []
        self._replayed: tuple[dict[int, Iterator[Array]], int] | None = None
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.QuantizedLinear):
                install_hook(module, self._projection(id(module)))
            elif module.children():
                install_hook(module, self._module())

    @contextmanager
    def recording(self, caches: Sequence[Any], rows: int) -> Iterator[list[RecordedCall]]:
        """Record the calls of a block of `rows` rows that are given these caches.

        The list that comes is filled when the block has been called.
        """
        self._caches, self._done = {id(cache) for cache in caches}, []
        found: list[RecordedCall] = []
        try:
            yield found
        finally:
            found += [heard for heard in self._done if heard.inner and heard.rows == rows]
            self._caches, self._within, self._done = set(), [], []

    def replay(self, recorded: Sequence[RecordedCall], rows: int) -> None:
        """Call again what was recorded, on the first rows; the caches have their state back."""
        for heard in recorded:
            projected = {name: iter(answers) for name, answers in heard.projected.items()}
            self._replayed = projected, rows
            try:
                heard.call(
                    *(_first(one, heard.rows, rows) for one in heard.args),
                    **{name: _first(one, heard.rows, rows) for name, one in heard.kwargs.items()},
                )
            finally:
                self._replayed = None

    def _module(self) -> Hook:
        def hook(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            given = self._caches and {id(one) for one in (*args, *kwargs.values())} & self._caches
            if not given:
                return call(*args, **kwargs)
            for outer in self._within:
                outer.inner &= not given & outer.caches
            arrays = (one for one in (*args, *kwargs.values()) if _is_array(one))
            rows = next((one.shape[_ROWS] for one in arrays), 0)
            self._within.append(RecordedCall(call, args, kwargs, rows, given))
            result = call(*args, **kwargs)
            self._done.append(self._within.pop())
            return result

        return hook

    def _projection(self, name: int) -> Hook:
        def hook(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if self._replayed is not None and name in self._replayed[0]:
                projected, rows = self._replayed
                answer = next(projected[name])
                return answer[:, :rows]
            answer = call(*args, **kwargs)
            heard = self._within[-1] if self._within else None
            if heard is not None and answer.ndim > _ROWS and answer.shape[_ROWS] == heard.rows:
                heard.projected.setdefault(name, []).append(answer)
            return answer

        return hook


def _is_array(value: Any) -> bool:
    import mlx.core as mx

    return isinstance(value, mx.array) and value.ndim > _ROWS


def _first(value: Any, of: int, rows: int) -> Any:
    """The first `rows` rows of an argument that has `of`; anything else as it is."""
    return value[:, :rows] if _is_array(value) and value.shape[_ROWS] == of else value
