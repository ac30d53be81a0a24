"""Weights of an ML program made smaller: 8 bits a number, or 4 bits into a table for each group.

coremltools does it. Which form the Neural Engine takes is in `lint`.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from paceline.errors import InvalidRequest

FORMS = ("int8", "int8-per-tensor", "int4", "f16")

_GROUP = 32
"""Channels that share a table of 16 numbers, for int4."""

_LEAST = 2048
"""Numbers in a weight that is worth it; norms stay as they are."""


def compress(model: Any, form: str, keep: Sequence[str] = ()) -> Any:
    """The model with its weights in a form of `FORMS`.

    `keep` are patterns of weights that stay float16, by their names in the layers, dots and all:
    `layers.0.*`, `*.down`, `head`.

    Raises:
        InvalidRequest: there is no such form.
    """
    import coremltools.optimize.coreml as optimize

    if form not in FORMS:
        raise InvalidRequest(f"weights is {form!r}; expected one of {', '.join(FORMS)}")
    kept = kept_weights(model, keep)
    if form == "f16":
        return model
    if form == "int4":
        each: Any = optimize.OpPalettizerConfig(
            nbits=4, granularity="per_grouped_channel", group_size=_GROUP, weight_threshold=_LEAST
        )
        shrink = optimize.palettize_weights
    else:
        granularity = "per_tensor" if form == "int8-per-tensor" else "per_channel"
        each = optimize.OpLinearQuantizerConfig(
            mode="linear_symmetric",
            dtype="int8",
            granularity=granularity,
            weight_threshold=_LEAST,
        )
        shrink = optimize.linear_quantize_weights
    config = optimize.OptimizationConfig(
        global_config=each, op_name_configs=dict.fromkeys(kept, None)
    )
    return shrink(model, config)


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuse patterns that name no weight of a model.

    Raises:
        InvalidRequest: naming those that do not.
    """
    unknown = [
        pattern
        for pattern in patterns
        if not any(fnmatch(name.removesuffix(".weight"), pattern) for name in names)
    ]
    if unknown:
        few = ", ".join(name.removesuffix(".weight") for name in names[:4])
        raise InvalidRequest(
            f"no weight is called {', '.join(unknown)}; expected patterns of names such as {few}, "
            "head"
        )


def kept_weights(model: Any, patterns: Sequence[str]) -> list[str]:
    """The names in the program of the weights that the patterns name."""
    import coremltools.optimize.coreml as optimize

    if not patterns:
        return []
    names = list(optimize.get_weights_metadata(model, weight_threshold=_LEAST))
    found: list[str] = []
    for pattern in patterns:
        # In a program dots are underscores, and a weight says of what and in what precision it is.
        mangled = pattern.replace(".", "_")
        hits = [name for name in names if fnmatch(name, f"{mangled}_weight*")]
        found += hits
    return found
