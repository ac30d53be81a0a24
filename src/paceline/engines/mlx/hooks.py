"""Hearing the calls of one module of a loaded model.

A module that is heard gets a class of its own, derived from the one it had: other modules of that
class, and the class, are as before, and nothing has to be undone when the model goes. Knows nothing
of what is heard.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Array = Any
"""An `mlx.core.array`; lazy unless said otherwise."""

Hook = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Stands in for a call: gets what would have been called, and with what; returns the result."""


def install_hook(module: Any, hook: Hook) -> None:
    """Let `hook` stand in for the calls of this one module from now on."""
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(kind.__call__.__get__(self), args, kwargs)

    names = {"__call__": call, "__doc__": kind.__doc__, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), names)


class Taps:
    """Hidden states after some of a model's layers, as calls bring them."""

    def __init__(self, layers: Sequence[Any], wanted: Sequence[int]) -> None:
        """Hear the layers `wanted`, by their numbers from 0."""
        self._heard: dict[int, Array] = {}
        for number in wanted:
            install_hook(layers[number], self._hook(number))

    def take(self) -> dict[int, Array]:
        """[T, d] for each layer, of the call that was made last."""
        heard, self._heard = self._heard, {}
        return {number: states[0] for number, states in heard.items()}

    def _hook(self, number: int) -> Hook:
        def hook(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            states = call(*args, **kwargs)
            self._heard[number] = states
            return states

        return hook
