"""Default settings in layers, each with its source.

For each setting the first layer that has it decides: the request, the registry's entry for the
model, the model's own files, the fallback. Values are validated elsewhere (`options.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

Source = Literal["request", "registry", "model", "fallback"]

NEUTRAL: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": None,
}
"""The settings that have layers, with neutral values: greedy, without a limit."""


class Setting(NamedTuple):
    """A value and the layer that it comes from."""

    value: Any
    source: Source


@dataclass(frozen=True, slots=True)
class Defaults:
    """The layers under a request; without arguments: greedy, for any model."""

    registry: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the registry's entry for the model."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings in the model's own files."""
    fallback: Mapping[str, Any] = field(default_factory=dict)
    """Fallbacks that differ from `NEUTRAL`."""

    def neutral(self) -> Self:
        """Return the same without registry and model: `--generation-config none`."""
        return replace(self, registry={}, model={})

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Setting]:
        """Return every setting of `NEUTRAL`, from the first layer that has it."""
        layers: Iterable[tuple[Source, Mapping[str, Any]]] = (
            ("request", request),
            ("registry", self.registry),
            ("model", self.model),
            ("fallback", {**NEUTRAL, **self.fallback}),
        )
        return {
            name: next(Setting(layer[name], source) for source, layer in layers if name in layer)
            for name in NEUTRAL
        }
