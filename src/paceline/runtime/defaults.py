"""What a request gets where it does not say: settings in layers, each with its source.

Knows names and layers. Knows nothing of files or of what a value may be. The rule: of the request,
the registry's entry for the model, the model's own files and the fallback, the first one that names
a setting decides, setting by setting.
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
"""The settings that have layers, as nothing but a request changes them: greedy, without a limit."""


class Setting(NamedTuple):
    """A value, and who named it."""

    value: Any
    source: Source


@dataclass(frozen=True, slots=True)
class Defaults:
    """The layers under a request; without arguments: greedy, whatever the model."""

    registry: Mapping[str, Any] = field(default_factory=dict)
    """What paceline's registry says of the model."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What the model's own files say."""
    fallback: Mapping[str, Any] = field(default_factory=dict)
    """What else differs from `NEUTRAL` where nothing is said."""

    def neutral(self) -> Self:
        """The same without registry and model: `--generation-config none`."""
        return replace(self, registry={}, model={})

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Setting]:
        """Every setting of `NEUTRAL`, from the first layer that names it."""
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
