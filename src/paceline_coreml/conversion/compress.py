"""Compresses the weights of an ML program with coremltools: 8 bits, or 4-bit lookup tables.

`lint` checks which formats the Neural Engine runs.
"""

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

from paceline.errors import InvalidRequest

_GROUP = 32
"""Channels that share a lookup table with 16 entries, for int4."""

_MIN_SIZE = 2048
"""Minimum elements of a weight to compress; norms stay float16."""


def compress(
    model: Any,
    form: str,
    keep: Sequence[str] = (),
    weights: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Return coremltools' ML program with its weights in a format of `Weights`.

    Those of modules that match a pattern of `keep` stay float16: `layers.0.*`, `*.down`, `head`.
    `weights` has the name of each weight in the layers -> its number of elements.

    Raises InvalidRequest if a weight to keep was merged with another.
    """
    import coremltools.optimize.coreml as optimize

    kept = kept_weights(model, keep, weights)
    if form == "f16":
        return model
    if form == "int4":
        op_config: Any = optimize.OpPalettizerConfig(
            nbits=4,
            granularity="per_grouped_channel",
            group_size=_GROUP,
            weight_threshold=_MIN_SIZE,
        )
        shrink = optimize.palettize_weights
    else:
        granularity = "per_tensor" if form == "int8-per-tensor" else "per_channel"
        op_config = optimize.OpLinearQuantizerConfig(
            mode="linear_symmetric",
            dtype="int8",
            granularity=granularity,
            weight_threshold=_MIN_SIZE,
        )
        shrink = optimize.linear_quantize_weights
    config = optimize.OptimizationConfig(
        global_config=op_config, op_name_configs=dict.fromkeys(kept, None)
    )
    # coremltools divides a row of zeros by its scale, which is 0, and rounds the NaN to 0.
    with warnings.catch_warnings(action="ignore"):
        return shrink(model, config)


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise InvalidRequest if a pattern matches no weight."""
    unknown = [pattern for pattern in patterns if not any(_names(pattern, name) for name in names)]
    if unknown:
        few = ", ".join(name.removesuffix(".weight") for name in names[:4])
        raise InvalidRequest(
            f"no weight matches {', '.join(unknown)}; expected patterns such as {few} or head"
        )


def _names(pattern: str, weight: str) -> bool:
    return fnmatch(weight.removesuffix(".weight"), pattern)


def kept_weights(model: Any, patterns: Sequence[str], weights: Mapping[str, int]) -> list[str]:
    """Return the program's names of the weights that match the patterns.

    Raises InvalidRequest if a matching weight is not in the program: the converter merges a
    projection with the scale after it.
    """
    import coremltools.optimize.coreml as optimize

    if not patterns:
        return []
    names = list(optimize.get_weights_metadata(model, weight_threshold=_MIN_SIZE))
    kept: list[str] = []
    for pattern in patterns:
        # The program's names have underscores for dots, and a suffix for tensor and precision.
        mangled = pattern.replace(".", "_")
        hits = [name for name in names if fnmatch(name, f"{mangled}_weight*")]
        large = [
            name for name, size in weights.items() if size >= _MIN_SIZE and _names(pattern, name)
        ]
        if large and not hits:
            raise InvalidRequest(
                f"{', '.join(large)} cannot stay float16: conversion merges it with another "
                f"weight; remove {pattern!r} from keep"
            )
        kept += hits
    return kept
