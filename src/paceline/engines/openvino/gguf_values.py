"""Mends two factors where OpenVINO 2026.4's GGUF frontend computes others than the model.

- gpt-oss: the chosen experts' logits go through a softmax. The frontend takes it over a dimension
  of size 1, so that each expert weighs 1.
- MiniCPM: logits are divided by the file's logit_scale. The frontend multiplies.

Found by comparing tiny models with others (tests/conformance/test_gguf_families.py).
"""

from typing import Any

import numpy as np

from paceline.storage.gguf_file import GgufFile

_EXPERTS = "moe_w_sm"
_LOGIT_SCALE = "minicpm.logit_scale"


def mend_values(model: Any, file: GgufFile) -> None:
    """Mend the frontend's graph `model` of `file`."""
    from openvino import opset13

    for node in model.get_ordered_ops():
        if node.get_type_name() != "Softmax" or not node.get_friendly_name().endswith(_EXPERTS):
            continue
        experts = node.input_value(0)  # [1, n, chosen, 1]
        if experts.get_partial_shape()[3] == 1:
            node.output(0).replace(opset13.softmax(experts, 2).output(0))
    scale = file.fields.get(_LOGIT_SCALE)
    if isinstance(scale, float) and scale > 0:
        logits = model.outputs[0].get_node().input(0)
        divided = opset13.multiply(logits.get_source_output(), np.float32(scale**-2))
        logits.replace_source_output(divided.output(0))
