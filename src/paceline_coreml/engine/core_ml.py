"""A shard that Core ML runs, through coremltools; Mac only.

Invariant: only this file and `compiled.py` call coremltools, and any error becomes a one-line
ModelError. The API is that of coremltools 9: `CompiledMLModel`, its `make_state` and `predict`.
`MLModel` is not used: it turns loading errors into warnings, and compiles in each process.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import MissingExtra, pip_install
from paceline_coreml.engine.compiled import CompiledShards
from paceline_coreml.engine.failures import Mac, failure, reason_of

Floats = npt.NDArray[np.float32]


class CoreMlPackage:
    """A loaded shard; see `packages.Package`. Methods raise ModelError if Core ML fails."""

    def __init__(self, path: Path, model: Any, mac: Mac) -> None:
        self._path, self._model, self._mac = path, model, mac

    def make_state(self) -> Any:
        try:
            return self._model.make_state()
        except Exception as error:  # pybind11 raises RuntimeError, TypeError and others
            raise failure("make a state for", self._path, self._mac, reason_of(error)) from error

    def predict(self, data: Mapping[str, Floats], state: Any = None) -> Mapping[str, Floats]:
        try:
            # A plain dict, which coremltools requires and may change.
            outputs: Mapping[str, Floats] = self._model.predict(dict(data), state)
        except Exception as error:
            raise failure("run", self._path, self._mac, reason_of(error)) from error
        return outputs


def load(
    shards: CompiledShards, folder: Path, path: str, *, function: str | None, units: str, mac: Mac
) -> CoreMlPackage:
    """Load a package's compiled model; compile it again if a cached one does not load.

    Args:
        shards: compiles the package if necessary.
        folder: the artifact.
        path: the package's path in it.
        function: name of the function; None: the default one.
        units: name in `ct.ComputeUnit`.
        mac: this machine's system.

    Raises:
        ModelError: the package cannot be compiled or loaded.
    """
    import coremltools as ct

    while True:
        (model,) = shards.models([path])
        try:
            loaded = ct.models.CompiledMLModel(
                str(model), compute_units=ct.ComputeUnit[units], function_name=function
            )
        except Exception as error:
            if shards.discard(path):
                continue
            raise failure("load", folder / path, mac, reason_of(error)) from error
        return CoreMlPackage(folder / path, loaded, mac)


def check_installed() -> None:
    try:
        import coremltools  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"running Core ML models needs coremltools; install it with: {pip_install('coreml')}"
        ) from error
