"""Refusing what a config asks for and a family does not do: nothing is passed over in silence.

Knows the fields of transformers' configs. Knows no family. The rule: the error names the field, the
value it has and what it was expected to be.
"""

from typing import Any

from paceline.errors import ModelError

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Types of RoPE whose frequencies do not depend on how long a text has become."""


def expect(config: Any, field: str, *values: object) -> None:
    """Refuse a config whose `field` has none of the values that are implemented.

    Raises:
        ModelError: it has another.
    """
    if getattr(config, field) not in values:
        raise refusal(config, field, getattr(config, field), _either(values))


def expect_rope(config: Any, *types: str, partial: bool = False) -> None:
    """Refuse other types of rotary embeddings, and those of a part of a head unless `partial`.

    Raises:
        ModelError: the config has one.
    """
    rope = config.rope_parameters
    found = rope.get("rope_type")
    if found not in types:
        raise refusal(config, "rope_type", found, _either(types))
    part = rope.get("partial_rotary_factor")
    if not partial and part not in (None, 1):
        raise refusal(config, "partial_rotary_factor", part, "1.0")


def expect_layer_types(config: Any, *types: str) -> None:
    """Refuse layers of other types.

    Raises:
        ModelError: the config has one, or does not say a type for every layer.
    """
    found = config.layer_types or []
    others = sorted(set(found) - set(types))
    if others or len(found) != config.num_hidden_layers:
        expected = f"{config.num_hidden_layers} of {_either(types)}"
        raise refusal(config, "layer_types", others or found, expected)


def expect_unused_window(config: Any, slots: int) -> None:
    """Refuse a sliding window that a text of `slots` tokens would be longer than.

    Raises:
        ModelError: the config has one; the message says what to choose.
    """
    window = config.sliding_window
    if window is not None and window < slots:
        expected = f"at least the {slots} slots of a text: choose at most {window} slots"
        raise refusal(config, "sliding_window", window, expected)


def refusal(config: Any, field: str, found: object, expected: str) -> ModelError:
    """The error for a field that asks for what is not implemented."""
    return ModelError(
        f"the config of this {config.model_type} model has {field} {found!r}; expected {expected}"
    )


def _either(values: tuple[object, ...]) -> str:
    return " or ".join(map(repr, values))
