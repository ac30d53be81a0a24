"""What the code that runs OpenVINO shares: its Core, its file names, the reason in its errors."""

from functools import cache
from typing import Any

GRAPH = "openvino_model.xml"
LANGUAGE = "openvino_language_model.xml"
"""The decoder of a model that also sees images; its input is embeddings."""
EMBEDDINGS = "openvino_text_embeddings_model.xml"
"""The embeddings of text, beside `LANGUAGE`."""


def weights_of(graph: str) -> str:
    """Name of a graph's file of weights."""
    return graph.removesuffix(".xml") + ".bin"


def reason_of(error: Exception) -> str:
    """The last line of OpenVINO's message, which has the reason."""
    return str(error).strip().splitlines()[-1]


@cache
def core() -> Any:
    """The `openvino.Core` of this process, for every graph that is read or compiled.

    The CPU plugin of a Core gives signals a stack of its own, and at its end sets the stack that it
    found (OpenVINO 2026.4.1). Of two Cores that end in the order in which they began, the second
    sets the freed stack of the first; from then on any signal, such as Ctrl-C, ends the process
    with a segmentation fault.
    """
    import openvino as ov

    return ov.Core()
