"""OpenVINO's package, which is imported through here alone: without reports, and with one Core."""

from functools import cache
from typing import Any

import paceline  # noqa: F401  (turns off what OpenVINO would report)
from paceline.errors import MissingExtra


def openvino() -> Any:
    """The package `openvino`. Raises MissingExtra if it is not installed."""
    try:
        import openvino
    except ImportError as error:
        raise MissingExtra(
            "the engine openvino needs: pip install 'paceline[openvino]'; a GGUF file of the model "
            "runs without it"
        ) from error
    return openvino


@cache
def core() -> Any:
    """The `openvino.Core` of this process, for every graph that is read or compiled.

    The CPU plugin of a Core gives signals a stack of its own, and at its end sets the stack that it
    found (OpenVINO 2026.4.1). Of two Cores that end in the order in which they began, the second
    sets the freed stack of the first; from then on any signal, such as Ctrl-C, ends the process
    with a segmentation fault.
    """
    return openvino().Core()


def reason_of(error: Exception) -> str:
    """The last line of OpenVINO's message, which has the reason."""
    return str(error).strip().splitlines()[-1]
