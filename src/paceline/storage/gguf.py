"""Reads the graph of a GGUF file with OpenVINO's GGUF frontend; what to do if it does not run."""

import os
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.gguf_file import read_gguf, short
from paceline.storage.openvino import reason_of


def read_gguf_graph(path: Path) -> Any:
    """The graph of a language model: stateless, with the file's weights in their 4 to 16 bits.

    Its first output is the logits; see OpenVINO's `src/frontends/gguf/docs/runtime.md`.

    Raises ModelError if the frontend does not know the architecture or the form of the weights.
    """
    from openvino.frontend import FrontEndManager

    # Without it, the zero points of Q4_K are rounded to whole numbers.
    os.environ["OV_GGUF_Q4_K_ZP_F16"] = "1"
    frontend = FrontEndManager().load_by_framework("gguf")
    try:
        return frontend.convert(frontend.load(str(path)))
    except Exception as error:  # of the frontend, whose classes have no common base
        raise graph_fault(path, reason_of(error)) from error


def graph_fault(path: Path, reason: str) -> ModelError:
    """The error for a complete file that OpenVINO cannot convert, or whose graph does not run.

    Its metadata may be wrong, or its graph one that paceline does not know.
    """
    family = short(repr(read_gguf(path).fields.get("general.architecture")))
    return ModelError(
        f"{path}, of the family {family}, cannot be opened by OpenVINO: {reason}. If "
        "llama.cpp runs the file, it is not damaged: report it as a fault of paceline; until then, "
        "`--engine llamacpp` may run it"
    )
