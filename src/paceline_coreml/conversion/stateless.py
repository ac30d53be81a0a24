"""States as inputs and outputs of a package, for machines where they leave the Neural Engine.

A state N is then an input `N_in` and an output `N_out`, which the engine passes to the next forward
pass; see `engine.packages.StatelessPackage`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from paceline_coreml.engine.packages import state_input, state_output


class _Place(NamedTuple):
    owner: nn.Module
    attribute: str
    name: str
    shape: tuple[int, ...]


def _program_name(buffer: str) -> str:
    return buffer.replace(".", "_")


def state_shapes(layer: nn.Module, index: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the states of layer `index`, by name in the program."""
    buffers = layer.named_buffers(f"layers.{index}")
    return {_program_name(name): tuple(buffer.shape) for name, buffer in buffers}


class OutsideStates:
    """The states of a module, removed from it: `load` before a pass, and `stored` after it.

    `layers.write_state` assigns states that are not buffers, so nothing is written in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            _Place(owner, attribute, _program_name(f"{path}.{attribute}"), tuple(buffer.shape))
            for path, owner in module.named_modules()
            for attribute, buffer in list(owner.named_buffers(recurse=False))
        ]
        for place in self._places:
            delattr(place.owner, place.attribute)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {state_input(place.name): place.shape for place in self._places}

    @property
    def outputs(self) -> list[str]:
        return [state_output(place.name) for place in self._places]

    def load(self, states: Sequence[Tensor]) -> None:
        for place, state in zip(self._places, states, strict=True):
            setattr(place.owner, place.attribute, state)

    def stored(self) -> list[Tensor]:
        return [getattr(place.owner, place.attribute) for place in self._places]
