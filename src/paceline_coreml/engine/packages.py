"""Opens shards: with Core ML on a Mac, with the emulator elsewhere.

Both have `make_state` and `predict`, so callers do not distinguish them.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest
from paceline_coreml.engine.artifact import Artifact
from paceline_coreml.engine.compiled import CompiledShards, check_installed
from paceline_coreml.engine.failures import this_mac

UNITS = {
    "cpu-and-ne": "CPU_AND_NE",
    "all": "ALL",
    "cpu-only": "CPU_ONLY",
    "cpu-and-gpu": "CPU_AND_GPU",
}
"""paceline's name of compute units -> name in `ct.ComputeUnit`."""

DEFAULT_UNITS = "cpu-and-ne"

REHEARSED = "rehearsed"
"""Replaces the compute units where Core ML is not available."""


class Package(Protocol):
    """A loaded shard."""

    def make_state(self) -> Any:
        """Create a state with all zeros."""
        ...

    def predict(
        self, data: Mapping[str, npt.NDArray[np.float32]], state: Any = None
    ) -> Mapping[str, npt.NDArray[np.float32]]:
        """Run the shard once; `data` and outputs are by name."""
        ...


def state_input(name: str) -> str:
    return f"{name}_in"


def state_output(name: str) -> str:
    return f"{name}_out"


class StatelessPackage:
    """A package whose states are inputs and outputs, with the interface of a stateful one."""

    def __init__(self, package: Package, states: Mapping[str, Sequence[int]]) -> None:
        """Wrap a package with `states`, name -> shape."""
        self._package, self._states = package, states

    def make_state(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: np.zeros(shape, np.float32) for name, shape in self._states.items()}

    def predict(
        self, data: Mapping[str, npt.NDArray[np.float32]], state: Any = None
    ) -> Mapping[str, npt.NDArray[np.float32]]:
        inputs = {state_input(name): value for name, value in state.items()}
        outputs = dict(self._package.predict({**data, **inputs}))
        state.update({name: outputs.pop(state_output(name)) for name in self._states})
        return outputs


class Packages(NamedTuple):
    layers: Sequence[Package]
    heads: Sequence[Package]


def on_a_mac() -> bool:
    return sys.platform == "darwin"


class PackageOpener:
    """An opener for the shards of one artifact."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        units: str,
        rounding: str,
        on_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Check that this machine can run shards.

        `units`, one of `UNITS`, are Core ML's; `rounding` is the emulator's, which also runs on a
        Mac with "f32". `on_message` gets a message before Core ML compiles shards, once.

        Raises:
            InvalidRequest: `units` is unknown.
            MissingExtra: coremltools is not installed.
            ModelError: this macOS is too old.
        """
        if units not in UNITS:
            raise InvalidRequest(f"compute units are {units!r}; expected one of {', '.join(UNITS)}")
        self._artifact, self._units, self._rounding = artifact, UNITS[units], rounding
        self._compiled: CompiledShards | None = None
        if on_a_mac() and rounding != "f32":
            mac = this_mac()
            mac.check()
            check_installed()
            self._compiled = CompiledShards(artifact, mac, on_message)

    def open(self, path: str, function: str | None) -> Package:
        """Load the shard at a path in the artifact; `function` None: the default one.

        Raises ModelError if it cannot be loaded.
        """
        package = self._open(path, function)
        shards = self._artifact.layer_shards
        states = next((shard.states for shard in shards if shard.path == path), {})
        return StatelessPackage(package, states) if states else package

    def _open(self, path: str, function: str | None) -> Package:
        if self._compiled is not None:
            return self._compiled.load(path, function=function, units=self._units)
        from paceline_coreml.rehearsal.model import RehearsalModel

        package = self._artifact.folder / path
        return RehearsalModel(package, function_name=function, rounding=self._rounding)

    def open_all(self, function: str | None) -> Packages:
        artifact = self._artifact
        if self._compiled is not None:
            every = (*artifact.layer_shards, *artifact.head_shards)
            self._compiled.models([shard.path for shard in every])
        layers, heads = (
            [self.open(shard.path, function) for shard in shards]
            for shards in (artifact.layer_shards, artifact.head_shards)
        )
        return Packages(layers, heads)
