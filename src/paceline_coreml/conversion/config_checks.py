"""Rejects configs with features that a family does not implement: nothing is ignored.

The checks use the field names of transformers' configs, and work for any family. Every error names
the field, its value and the expected value.
"""

from typing import Any

from paceline.errors import ModelError

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the length of the text."""


def check_field(config: Any, field: str, *values: object) -> None:
    """Raise ModelError unless `field` has one of the implemented values."""
    if getattr(config, field) not in values:
        raise unsupported(config, field, getattr(config, field), _either(values))


def check_rope(config: Any, *types: str, partial: bool = False) -> None:
    """Raise ModelError for other RoPE types, and unless `partial` for RoPE on part of a head."""
    rope = config.rope_parameters
    rope_type = rope.get("rope_type")
    if rope_type not in types:
        raise unsupported(config, "rope_type", rope_type, _either(types))
    part = rope.get("partial_rotary_factor")
    if not partial and part not in (None, 1):
        raise unsupported(config, "partial_rotary_factor", part, "1.0")


def check_layer_types(config: Any, *types: str) -> None:
    """Raise ModelError unless the config gives every layer one of these types."""
    layer_types = config.layer_types or []
    others = sorted(set(layer_types) - set(types))
    if others or len(layer_types) != config.num_hidden_layers:
        expected = f"{config.num_hidden_layers} of {_either(types)}"
        raise unsupported(config, "layer_types", others or layer_types, expected)


def check_window_unused(config: Any, slots: int) -> None:
    """Raise ModelError if the sliding window is shorter than the context of `slots` tokens."""
    window = config.sliding_window
    if window is not None and window < slots:
        expected = f"at least the {slots} slots of the context; choose at most {window} slots"
        raise unsupported(config, "sliding_window", window, expected)


def unsupported(config: Any, field: str, value: object, expected: str) -> ModelError:
    return ModelError(
        f"this {config.model_type} model's config has {field} {value!r}; expected {expected}"
    )


def _either(values: tuple[object, ...]) -> str:
    return " or ".join(map(repr, values))
