"""Reads the graph of a GGUF file with OpenVINO's GGUF frontend."""

import os
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
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
        raise ModelError(f"{path} cannot be opened by OpenVINO: {reason_of(error)}") from error
