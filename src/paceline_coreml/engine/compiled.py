"""Shards that Core ML runs, through coremltools; Mac only.

A compilation takes minutes, so processes share compiled shards. They are next to the packages, or
in the user's cache if the artifact is read-only:

    compiled/25B78-1a2b3c4d5e6f7a8b/         macOS build, fingerprint of the artifact
        layers-000-010/model.mlmodelc
        layers-000-010/files.json            sizes of the files in model.mlmodelc

A child process compiles (`_main`): the compiler writes to stdout, holds the GIL, and may be killed.
coremltools' `MLModel` is not used: it turns loading errors into warnings, and compiles in each
process. Invariants: a shard's folder appears by one rename, after its sizes were recorded; one
process compiles at a time, and first removes shards of other builds; any error is one line.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import MissingExtra, ModelError, pip_install
from paceline.storage.files import read_json, write_json, writing
from paceline.system.machine import cache_dir, lock_path
from paceline.system.processes import python, run_child
from paceline_coreml.engine.artifact import Artifact
from paceline_coreml.engine.failures import Mac, failure, reason_of

Floats = npt.NDArray[np.float32]

MODEL = "model.mlmodelc"
_FILES = "files.json"
_MAKING = ".making"


class CompiledShards:
    def __init__(self, artifact: Artifact, mac: Mac, on_message: Callable[[str], None]) -> None:
        """Prepare the cache; `on_message` gets a message before packages are compiled."""
        self._artifact, self._mac, self._on_message = artifact, mac, on_message
        writable = os.access(artifact.folder, os.W_OK)
        above = artifact.folder if writable else cache_dir() / "coreml" / artifact.fingerprint[:16]
        self.folder = above / "compiled" / f"{mac.build}-{artifact.fingerprint[:16]}"
        self._compiled_here: set[str] = set()

    def models(self, paths: Sequence[str]) -> list[Path]:
        """Return the compiled models of packages, given their paths in the artifact's folder.

        Raises:
            ModelError: Core ML cannot compile a package.
            InvalidRequest: the compiled models cannot be written.
        """
        with writing(self.folder):
            if not all(map(self._is_whole, paths)):
                self.folder.mkdir(parents=True, exist_ok=True)
                with self._alone():
                    self._clean_up()
                    self._compile([path for path in paths if not self._is_whole(path)])
        return [self._place(path) / MODEL for path in paths]

    def load(self, path: str, *, function: str | None, units: str) -> "CoreMlPackage":
        """Load the compiled model of the package `path`; compile it again if a cached one fails.

        `units` is a name in `ct.ComputeUnit`. Raises ModelError if it cannot be compiled or loaded.
        """
        import coremltools as ct

        package = self._artifact.folder / path
        while True:
            (model,) = self.models([path])
            try:
                loaded = ct.models.CompiledMLModel(
                    str(model), compute_units=ct.ComputeUnit[units], function_name=function
                )
            except Exception as error:
                if self._discard(path):
                    continue
                raise failure("load", package, self._mac, reason_of(error)) from error
            return CoreMlPackage(package, loaded, self._mac)

    def _discard(self, path: str) -> bool:
        """Remove a package's compiled model, unless this process compiled it; return True if so.

        This is for a model that does not load: a newly compiled one may load.
        """
        if path in self._compiled_here:
            return False
        with writing(self.folder), self._alone():
            shutil.rmtree(self._place(path), ignore_errors=True)
        return True

    def _place(self, path: str) -> Path:
        return self.folder / path.removesuffix(".mlpackage")

    def _is_whole(self, path: str) -> bool:
        """Return whether a package's compiled model exists, with files of the recorded sizes."""
        place = self._place(path)
        try:
            return read_json(place / _FILES) == _sizes(place / MODEL) != {}
        except (ModelError, OSError):
            return False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process compiles this artifact."""
        release = lock_path(self.folder.parent, wait=False)
        if release is None:
            self._on_message(f"waiting for another process to compile {self._artifact.name}")
            release = lock_path(self.folder.parent, wait=True)
        if release is None:
            raise ModelError(
                f"{self.folder.parent} cannot be locked; move {self._artifact.folder} to a local "
                "disk"
            )
        try:
            yield
        finally:
            release()

    def _clean_up(self) -> None:
        """Remove models of other builds and contents, and incomplete compilations."""
        for other in self.folder.parent.iterdir():
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)
        for place in self.folder.iterdir():
            if not self._is_whole(f"{place.name}.mlpackage"):
                shutil.rmtree(place, ignore_errors=True)

    def _compile(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        self._on_message(
            f"compiling {self._artifact.name} for Core ML, once for this version of macOS"
        )
        packages = [str(self._artifact.folder / path) for path in paths]
        ended = run_child(python("-m", __name__, str(self.folder), *packages))
        self._compiled_here |= {path for path in paths if self._is_whole(path)}
        missing = next((path for path in paths if path not in self._compiled_here), None)
        if missing is not None:
            raise failure("compile", self._artifact.folder / missing, self._mac, ended.reason)


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


def check_installed() -> None:
    try:
        import coremltools  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"running Core ML models needs coremltools; install it with: {pip_install('coreml')}"
        ) from error


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


def _main(arguments: Sequence[str]) -> None:
    """Compile packages into a folder, in the child process; on failure, print the reason last."""
    import coremltools as ct

    folder, *packages = map(Path, arguments)
    making = folder / _MAKING
    for package in packages:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        try:
            ct.models.utils.compile_model(str(package), str(making / MODEL))
        except Exception as error:  # coremltools raises plain Exception, Core ML RuntimeError
            sys.exit(reason_of(error))
        write_json(making / _FILES, _sizes(making / MODEL))
        making.rename(folder / package.stem)


if __name__ == "__main__":
    _main(sys.argv[1:])
