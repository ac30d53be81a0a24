"""Weights of an ML program made smaller: 8 bits a number, or 4 bits into a table for each group.

coremltools does it. Which form the Neural Engine takes is in `lint`.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

from paceline.errors import InvalidRequest

FORMS = ("int8", "int8-per-tensor", "int4", "f16")

_GROUP = 32
"""Channels that share a table of 16 numbers, for int4."""

_LEAST = 2048
"""Numbers in a weight that is worth it; norms stay as they are."""


def compress(
    model: Any,
    form: str,
    keep: Sequence[str] = (),
    weights: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """The model with its weights in a form of `FORMS`.

    `keep` are patterns of weights that stay float16, by their names in the layers, dots and all:
    `layers.0.*`, `*.down`, `head`. `weights` are the layers' own, by name, with how many numbers
    each has.

    Raises:
        InvalidRequest: there is no such form, or a weight that is to stay cannot be told apart.
    """
    import coremltools.optimize.coreml as optimize

    if form not in FORMS:
        raise InvalidRequest(f"weights is {form!r}; expected one of {', '.join(FORMS)}")
    kept = kept_weights(model, keep, weights)
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
    unknown = [pattern for pattern in patterns if not any(_names(pattern, name) for name in names)]
    if unknown:
        few = ", ".join(name.removesuffix(".weight") for name in names[:4])
        raise InvalidRequest(
            f"no weight is called {', '.join(unknown)}; expected patterns of names such as {few}, "
            "head"
        )


def _names(pattern: str, weight: str) -> bool:
    return fnmatch(weight.removesuffix(".weight"), pattern)


def kept_weights(model: Any, patterns: Sequence[str], weights: Mapping[str, int]) -> list[str]:
    """The names in the program of the weights that the patterns name.

    Raises:
        InvalidRequest: a pattern names one that has lost its name: the converter multiplies a
            projection with a scale that stands behind it.
    """
    import coremltools.optimize.coreml as optimize

    if not patterns:
        return []
    names = list(optimize.get_weights_metadata(model, weight_threshold=_LEAST))
    found: list[str] = []
    for pattern in patterns:
        # In a program dots are underscores, and a weight says of what and in what precision it is.
        mangled = pattern.replace(".", "_")
        hits = [name for name in names if fnmatch(name, f"{mangled}_weight*")]
        large = [name for name, size in weights.items() if size >= _LEAST and _names(pattern, name)]
        if large and not hits:
            raise InvalidRequest(
                f"{', '.join(large)}: cannot stay float16, because converting merges it with "
                f"another weight; leave {pattern!r} away"
            )
        found += hits
    return found
