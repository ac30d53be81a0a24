"""A fake Mac: coremltools' own Python layer over a stand-in for its compiled half.

`libcoremlpython` is the only part of coremltools that needs macOS. Its `_MLModelProxy` is replaced
by one that compiles by copying and runs the rehearsal, and that accepts and rejects the same
input as the C++ (coremltools 9, coremlpython/CoreMLPython.mm and CoreMLPythonUtils.mm). Every call
into it is counted, and can fail like Core ML.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.system.processes import Finished
from paceline_coreml.engine import compiled, packages
from paceline_coreml.engine import engine as engine_module
from paceline_coreml.engine.failures import Mac
from paceline_coreml.rehearsal.model import RehearsalModel

REASON = "Failed to build the model execution plan, with error code: -14."
"""What Core ML says of a model that does not load."""

_ERROR = f'{{\n    NSLocalizedDescription = "{REASON}";\n    NSUnderlyingError = "...";\n}}'
"""`userInfo` of the NSError, which `Utils::handleError` makes the text of a RuntimeError."""

COMPILE, LOAD, STATE, PREDICT = "compile", "load", "state", "predict"

TAKEN = {np.dtype(kind) for kind in (np.int32, np.int8, np.float32, np.float64)}
"""`PybindCompatibleArray.dataTypeOf`"""


class FakeMac:
    """Calls into Core ML, and which of them fail."""

    def __init__(self) -> None:
        self.system = Mac("26.1", "25B78")
        self.calls: list[str] = []
        """One of the kinds above per call."""
        self.fails: Callable[[int], bool] = lambda _: False
        """Whether call number N fails, from 0."""
        self.units: list[str] = []
        """Compute units per loaded model."""

    def call(self, kind: str) -> None:
        self.calls.append(kind)
        if self.fails(len(self.calls) - 1):
            raise RuntimeError(_ERROR)

    def again(self) -> None:
        """Forget the calls; none fails."""
        self.calls.clear()
        self.fails = lambda _: False


class State:
    """`_State`"""

    def __init__(self, state: Any) -> None:
        self.state = state


def proxy_of(mac: FakeMac, temporary: Path) -> type:
    """`_MLModelProxy` of this machine."""

    class Proxy:
        def __init__(
            self, path: str, units: str, function: str, hints: dict[str, str], asset: None
        ) -> None:
            assert (path.endswith(".mlmodelc"), hints, asset) == (True, {}, None)
            mac.call(LOAD)
            mac.units.append(units)
            try:
                self._model = RehearsalModel(Path(path), function_name=function or None)
            except PacelineError as error:
                raise RuntimeError(str(error)) from error

        @staticmethod
        def compileModel(path: str) -> str:  # noqa: N802
            mac.call(COMPILE)
            target = temporary / "compiler" / f"{Path(path).stem}.mlmodelc"
            shutil.copytree(path, target)
            return str(target)

        @staticmethod
        def maximum_supported_specification_version() -> int:
            return 9

        def newState(self) -> State:  # noqa: N802
            mac.call(STATE)
            return State(self._model.make_state())

        def predict(self, data: dict[str, Any], state: State | None) -> dict[str, np.ndarray]:
            assert type(data) is dict
            assert state is None or type(state) is State
            for name, array in data.items():
                # All else is printed, and then rejected in these words.
                if not (isinstance(name, str) and isinstance(array, np.ndarray) and _taken(array)):
                    raise RuntimeError("value type not convertible")
            mac.call(PREDICT)
            try:
                outputs = self._model.predict(data, state.state if state else None)
            except PacelineError as error:
                raise RuntimeError(str(error)) from error
            return {name: _padded(array) for name, array in outputs.items()}

    return Proxy


def _taken(array: np.ndarray) -> bool:
    """`mutable_data` needs a writable array; strides become unsigned numbers of elements."""
    strides = (stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return array.dtype in TAKEN and array.flags.writeable and all(strides)


def _padded(array: np.ndarray) -> np.ndarray:
    """An array whose rows are not contiguous, as those of the Neural Engine are."""
    wide = np.full((*array.shape[:-1], array.shape[-1] + 3), np.nan, array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide[..., : array.shape[-1]]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMac:
    """Core ML is here. Packages are compiled in this process."""
    pytest.importorskip("coremltools")
    import coremltools
    from coremltools.models import _compiled_model, model, utils

    mac = FakeMac()
    proxy = proxy_of(mac, tmp_path)
    library: Any = ModuleType("coremltools.libcoremlpython")
    library._MLModelProxy = proxy
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setattr(coremltools, "libcoremlpython", library, raising=False)
    for module in (_compiled_model, model):
        monkeypatch.setattr(module, "_MLModelProxy", proxy)
    for module in (_compiled_model, model, utils):
        monkeypatch.setattr(module, "_macos_version", lambda: (26, 1))
    for module in (packages, engine_module):
        monkeypatch.setattr(module, "on_a_mac", lambda: True)
    monkeypatch.setattr(packages, "this_mac", lambda: mac.system)

    def run_child(argv: Sequence[str]) -> Finished:
        arguments = argv[argv.index(compiled.__name__) + 1 :]
        try:
            compiled._main(arguments)
        except SystemExit as ended:
            return Finished(1, (str(ended),))
        return Finished(0, ())

    monkeypatch.setattr(compiled, "run_child", run_child)
    return mac
