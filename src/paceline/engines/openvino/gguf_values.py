"""Mends factors where OpenVINO 2026.4's GGUF frontend computes others than the model.

- gpt-oss: the chosen experts' logits go through a softmax. The frontend takes it over a dimension
  of size 1, so that each expert weighs 1.
- GLM 4.5: an expert's weight is the sigmoid of its logit, and experts are chosen by the sum of it
  and a bias of their own. The frontend takes a softmax, and no bias.
- MiniCPM: logits are divided by the file's logit_scale. The frontend multiplies.

Found by comparing tiny models with others (tests/conformance/test_gguf_families.py).
"""

import re
from typing import Any

import numpy as np

from paceline.storage.gguf_file import GgufFile

_EXPERTS = "moe_w_sm"
_PROBABILITIES = re.compile(r"blk\.(\d+)\.moe_probs$")
_GATING, _SIGMOID = "glm4moe.expert_gating_func", 2
_LOGIT_SCALE = "minicpm.logit_scale"


def mend_values(model: Any, file: GgufFile) -> None:
    """Mend the frontend's graph `model` of `file`."""
    from openvino import opset13

    is_glm = file.fields.get("general.architecture") == "glm4moe"
    is_sigmoid = is_glm and file.fields.get(_GATING, _SIGMOID) == _SIGMOID
    biases = {each.name: each.data for each in file.tensors} if is_sigmoid else {}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Softmax":
            continue
        if node.get_friendly_name().endswith(_EXPERTS):
            experts = node.input_value(0)  # [1, n, chosen, 1]
            if experts.get_partial_shape()[3] == 1:
                node.output(0).replace(opset13.softmax(experts, 2).output(0))
        elif is_sigmoid and (found := _PROBABILITIES.search(node.get_friendly_name())):
            _choose_by_sigmoid(node, biases.get(f"blk.{found[1]}.exp_probs_b.bias"))
    scale = file.fields.get(_LOGIT_SCALE)
    if isinstance(scale, float) and scale > 0:
        logits = model.outputs[0].get_node().input(0)
        divided = opset13.multiply(logits.get_source_output(), np.float32(scale**-2))
        logits.replace_source_output(divided.output(0))


def _choose_by_sigmoid(softmax: Any, bias: Any) -> None:
    """Weigh experts by the sigmoid of their logits [1, 1, n, experts], and add a bias to choose."""
    from openvino import opset13

    weights = opset13.sigmoid(softmax.input_value(0)).output(0)
    softmax.output(0).replace(weights)
    if bias is not None:
        chosen_by = opset13.add(weights, bias.view(np.float32).reshape(1, 1, 1, -1)).output(0)
        for reader in weights.get_target_inputs():
            if reader.get_node().get_type_name() == "TopK":
                reader.replace_source_output(chosen_by)
