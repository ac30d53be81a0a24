"""The protobuf messages of a Core ML model, from coremltools.

Importing coremltools takes seconds, imports torch if installed, and prints version warnings. Its
generated messages need only protobuf, so its folder `proto` is imported as a separate package.
protobuf keeps one object per message, so both imports have the same ones.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from paceline.errors import MissingExtra, pip_install

_ALONE = "_paceline_coreml_proto"


def messages(module: str) -> ModuleType:
    """Import one of coremltools' generated modules, such as `Model_pb2`.

    Raises MissingExtra if coremltools is not installed.
    """
    if "coremltools" in sys.modules:
        return importlib.import_module(f"coremltools.proto.{module}")
    if _ALONE not in sys.modules:
        spec = importlib.util.find_spec("coremltools")
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtra(
                "reading a Core ML package needs coremltools; install it with: "
                f"{pip_install('coreml')}"
            )
        folder = Path(spec.submodule_search_locations[0]) / "proto"
        package = ModuleType(_ALONE)
        package.__path__ = [str(folder)]
        sys.modules[_ALONE] = package
    return importlib.import_module(f"{_ALONE}.{module}")
