"""Hooks on individual modules of a loaded model.

A hooked module gets its own subclass of its former class. Other modules of that class are not
affected, and nothing has to be undone when the model is freed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Array = Any
"""An `mlx.core.array`; lazy unless documented otherwise."""

ROWS = 1
"""The row axis in [1, T, ...]."""

Call = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]

Hook = Callable[[Call, Args, Kwargs], Any]
"""Replaces a module's call: gets the original callable and its arguments; returns the result."""


def install_hook(module: Any, hook: Hook) -> None:
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(kind.__call__.__get__(self), args, kwargs)

    names = {"__call__": call, "__doc__": kind.__doc__, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), names)


def is_rows(value: Any) -> bool:
    """Return True for an array that could be [1, T, ...]."""
    import mlx.core as mx

    return isinstance(value, mx.array) and value.ndim > 1


def tap(module: Any, states: dict[int, Array], layer: int) -> None:
    """Store a layer's hidden states, [1, T, d], in `states` whenever it is called."""

    def record(call: Call, args: Args, kwargs: Kwargs) -> Any:
        states[layer] = call(*args, **kwargs)
        return states[layer]

    install_hook(module, record)
