"""Mends factors and norms where OpenVINO 2026.4's GGUF frontend computes others than the model.

- gpt-oss: the chosen experts' logits go through a softmax. The frontend takes it over a dimension
  of size 1, so that every expert weighs 1.
- GLM 4.5: an expert's weight is the sigmoid of its logit, and experts are chosen by the sum of it
  and a bias of their own. The frontend takes a softmax, and no bias.
- MiniCPM: logits are divided by the file's logit_scale. The frontend multiplies.
- EXAONE 4: what attention and feed-forward give is normalized, before it is added to the stream.
  The frontend normalizes what they take.

Found by comparing tiny models with others (tests/conformance/test_gguf_families.py).
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile

_EXPERTS = "moe_w_sm"
_PROBABILITIES = re.compile(r"blk\.(\d+)\.moe_probs$")
_GATING, _SIGMOID = "glm4moe.expert_gating_func", 2
_LOGIT_SCALE = "minicpm.logit_scale"
_FAMILY = "exaone4"
_SUBLAYERS = {"attn_norm": "attn_out", "ffn_norm": "ffn_out"}
"""Norm -> what it follows."""


def fix_values(model: Any, file: GgufFile, path: Path) -> None:
    """Mend the frontend's graph `model` of `file`, at `path`.

    Raises ModelError for a file that does not say which layers have its window, RuntimeError for a
    graph without the nodes that are fixed.
    """
    from openvino import opset13

    _fix_norms(model, file, path)
    is_glm = file.fields.get("general.architecture") == "glm4moe"
    is_sigmoid = is_glm and file.fields.get(_GATING, _SIGMOID) == _SIGMOID
    biases = {tensor.name: tensor.data for tensor in file.tensors} if is_sigmoid else {}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Softmax":
            continue
        if node.get_friendly_name().endswith(_EXPERTS):
            experts = node.input_value(0)  # [1, n, chosen, 1]
            if experts.get_partial_shape()[3] == 1:
                node.output(0).replace(opset13.softmax(experts, 2).output(0))
        elif is_sigmoid and (match := _PROBABILITIES.search(node.get_friendly_name())):
            _choose_by_sigmoid(node, biases.get(f"blk.{match[1]}.exp_probs_b.bias"))
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


def _fix_norms(model: Any, file: GgufFile, path: Path) -> None:
    """Put EXAONE 4's norms after what they follow."""
    if file.fields.get("general.architecture") != _FAMILY:
        return
    prefix = f"{_FAMILY}.attention."
    if file.fields.get(f"{prefix}sliding_window") and (
        f"{prefix}sliding_window_pattern" not in file.fields
    ):
        raise ModelError(
            f"{path} has a sliding window and no {prefix}sliding_window_pattern, the layers that "
            "have it; convert its checkpoint again"
        )
    epsilon = np.float32(file.fields[f"{prefix}layer_norm_rms_epsilon"])
    nodes = {node.get_friendly_name().rpartition("blk.")[2]: node for node in model.get_ops()}
    for layer in range(file.fields[f"{_FAMILY}.block_count"]):
        for norm, sublayer in _SUBLAYERS.items():
            names = [f"{layer}.{name}" for name in (norm, f"{norm}.rms", sublayer)]
            if missing := [name for name in names if name not in nodes]:
                raise RuntimeError(f"its graph has no blk.{missing[0]}, by which norms are fixed")
            before, scaled, after = (nodes[name] for name in names)
            weight = before.input_value(1)
            _feed(before.output(0), scaled.input_value(0))
            output = after.output(0)
            readers = output.get_target_inputs()
            normed = _rms_norm(output, weight, epsilon)
            for reader in readers:
                reader.replace_source_output(normed)


def _feed(output: Any, value: Any) -> None:
    """Let every reader of `output` read `value`."""
    for reader in output.get_target_inputs():
        reader.replace_source_output(value)


def _rms_norm(rows: Any, weight: Any, epsilon: np.float32) -> Any:
    """Output of the form of `rows`, divided by its root mean square and times `weight`."""
    from openvino import opset13

    squares = opset13.reduce_mean(opset13.power(rows, np.float32(2)), np.array([-1]), True)
    root = opset13.sqrt(opset13.add(squares, epsilon))
    scaled = opset13.multiply(rows, opset13.power(root, np.float32(-1)))
    return opset13.multiply(scaled, weight).output(0)
