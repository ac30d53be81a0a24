"""Opens a shard: with Core ML on a Mac, with the rehearsal elsewhere.

Both have `make_state` and `predict`, so callers need not distinguish them.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline_coreml.engine.artifact import Artifact

UNITS = {
    "cpu-and-ne": "CPU_AND_NE",
    "all": "ALL",
    "cpu-only": "CPU_ONLY",
    "cpu-and-gpu": "CPU_AND_GPU",
}
"""paceline's name of compute units -> the name in `ct.ComputeUnit`."""

DEFAULT_UNITS = "cpu-and-ne"

REHEARSED = "rehearsed"
"""Replaces the compute units where Core ML is not available."""


class Package(Protocol):
    """A loaded shard."""

    def make_state(self) -> Any:
        """A new state, all zeros."""
        ...

    def predict(
        self, data: Mapping[str, npt.NDArray[np.float32]], state: Any = None
    ) -> Mapping[str, npt.NDArray[np.float32]]:
        """Run it once; `data` and outputs by name."""
        ...


class Packages(NamedTuple):
    """All shards of an artifact, in order."""

    layers: Sequence[Package]
    heads: Sequence[Package]


def on_a_mac() -> bool:
    """True if Core ML is available."""
    return sys.platform == "darwin"


def open_packages(artifact: Artifact, function: str | None, units: str, rounding: str) -> Packages:
    """Load all shards of an artifact; see `open_package`."""
    layers, heads = (
        [
            open_package(
                artifact.folder / shard.path, function=function, units=units, rounding=rounding
            )
            for shard in shards
        ]
        for shards in (artifact.layer_shards, artifact.head_shards)
    )
    return Packages(layers, heads)


def open_package(path: Path, *, function: str | None, units: str, rounding: str) -> Package:
    """Load a shard.

    Args:
        path: the `.mlpackage`.
        function: name of the function; None: the only one.
        units: one of `UNITS`; the rehearsal ignores it.
        rounding: "f16" or "f32", for the rehearsal.

    Raises:
        InvalidRequest: `units` is unknown.
        MissingExtra: coremltools is not installed.
        ModelError: the package cannot be loaded.
    """
    if units not in UNITS:
        raise InvalidRequest(f"compute units are {units!r}; expected one of {', '.join(UNITS)}")
    if not on_a_mac():
        from paceline_coreml.rehearsal.model import RehearsalModel

        return RehearsalModel(path, function_name=function, rounding=rounding)
    try:
        import coremltools as ct
    except ImportError as error:
        raise MissingExtra(
            "running Core ML models needs coremltools; install it with: "
            "pip install 'paceline[coreml]'"
        ) from error
    try:
        package: Package = ct.models.MLModel(
            str(path), function_name=function, compute_units=ct.ComputeUnit[UNITS[units]]
        )
    except Exception as error:  # Core ML raises RuntimeError and others
        raise ModelError(f"{path} cannot be loaded by Core ML: {error}") from error
    return package
