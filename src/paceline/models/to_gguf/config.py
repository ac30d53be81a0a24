"""Typed access to config.json, whatever version of transformers wrote it.

Invariant: a value that is missing or of another type is a ModelError that names its key.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.files import read_json

_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST = 2**31 - 1
"""GGUF's integers have 32 bits."""


class Config:
    """The text model's part of a config.json."""

    def __init__(self, path: Path) -> None:
        """Read `path`. Raises ModelError if it is unreadable or names no model_type."""
        whole = read_json(path)
        inner = whole.get("text_config")
        self.path = path
        self.has_other_modalities = isinstance(inner, dict)
        """Whether the checkpoint holds encoders of images or sound beside the text model."""
        self.values: Mapping[str, Any] = {**whole, **inner} if isinstance(inner, dict) else whole
        self.model_type = self.text("model_type")

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`; null counts as missing."""
        value = self.values.get(name)
        return default if value is None else value

    def integer(
        self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST
    ) -> int:
        """The first of `names` that is there, an integer from `least` to `most`."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of `names` that is there, a positive number."""
        name, value = self._first(names, default)
        return positive(self, name, value)

    def text(self, name: str) -> str:
        """The value of `name`, a string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """The value of `name`, true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def layer_types(self, layers: int) -> list[bool] | None:
        """Of each layer: whether its attention has a sliding window. None where nothing is said."""
        found = self.get("layer_types")
        if found is None:
            return None
        kinds = (_SLIDING, _FULL)
        is_list = isinstance(found, list) and len(found) == layers
        if not is_list or any(kind not in kinds for kind in found):
            raise self.wrong("layer_types", found, f"{layers} times {_FULL} or {_SLIDING}")
        return [kind == _SLIDING for kind in found]

    def wrong(self, name: str, value: object, expected: str) -> ModelError:
        """The error for a value that cannot be used."""
        shown = "is missing" if value is None else f"is {str(value)[:80]}"
        return ModelError(f"{self.path}: {name} {shown}; expected {expected}")

    def _first(self, names: Sequence[str], default: float | None) -> tuple[str, Any]:
        found = next((name for name in names if self.get(name) is not None), names[0])
        return found, self.get(found, default)


class Rope:
    """Rotary positions of one kind of layer, in the words of transformers 5."""

    def __init__(self, config: Config, values: Mapping[str, Any], theta: float) -> None:
        self._config = config
        self._values = values
        self.kind = str(values.get("rope_type") or values.get("type") or "default").lower()
        self.theta = self.number("rope_theta", default=theta)

    def number(self, name: str, default: float | None = None) -> float:
        """The value of `name`, a positive number."""
        value = self._values.get(name)
        return positive(
            self._config, f"rope_parameters.{name}", default if value is None else value
        )

    def numbers(self, name: str, count: int) -> list[float]:
        """The value of `name`, a list of `count` positive numbers."""
        found = self._values.get(name)
        if not isinstance(found, list) or len(found) != count:
            raise self._config.wrong(f"rope_parameters.{name}", found, f"{count} numbers")
        return [positive(self._config, f"rope_parameters.{name}", value) for value in found]

    def has(self, name: str) -> bool:
        """Whether the configuration says `name`."""
        return self._values.get(name) is not None


def read_ropes(
    config: Config, theta: float = 10_000.0, theta_sliding: float = 0
) -> tuple[Rope, Rope]:
    """Rotary positions of the layers with full attention, and of those with a sliding window.

    Args:
        config: its rope_parameters (transformers 5), or rope_theta, rope_scaling and
            rope_local_base_freq (before).
        theta: the family's base where nothing is said.
        theta_sliding: that of the layers with a window; 0: the same as the others.
    """
    # Next to rope_scaling, transformers 4 kept these at the top of config.json.
    tops = ("original_max_position_embeddings", "partial_rotary_factor")
    top = {name: config.get(name) for name in tops if config.get(name) is not None}
    said = _mapping(config, "rope_parameters") or _mapping(config, "rope_scaling")
    if "full_attention" in said or "sliding_attention" in said:
        full, sliding = (said.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
        if not isinstance(full, dict) or not isinstance(sliding, dict):
            raise config.wrong("rope_parameters", said, "an object for each kind of attention")
        return Rope(config, {**top, **full}, theta), Rope(config, sliding, theta_sliding or theta)
    full = Rope(config, {**top, **said}, config.number("rope_theta", default=theta))
    local = config.get("rope_local_base_freq")
    if local is None and not theta_sliding:
        return full, full
    return full, Rope(config, {"rope_theta": local}, theta_sliding or theta)


def _mapping(config: Config, name: str) -> Mapping[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, dict):
        raise config.wrong(name, found, "an object")
    return found


def positive(config: Config, name: str, value: object) -> float:
    """`value` as a float. Raises ModelError, which names `name`, for anything but a number > 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise config.wrong(name, value, "a positive number")
    return float(value)
