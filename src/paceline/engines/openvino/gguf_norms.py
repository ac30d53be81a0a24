"""Mends EXAONE 4's norms, which OpenVINO 2026.4's GGUF frontend puts before what they follow.

The model normalizes what attention and feed-forward give, before it is added to the stream; the
frontend normalizes what they take. Found by comparing tiny models with transformers
(tests/conformance/test_gguf_families.py).
"""

from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile

_FAMILY = "exaone4"
_SUBLAYERS = {"attn_norm": "attn_out", "ffn_norm": "ffn_out"}
"""Norm -> what it follows."""


def mend_norms(model: Any, file: GgufFile, path: Path) -> None:
    """Mend the frontend's graph `model` of `file`, at `path`.

    Raises ModelError for a file that does not say which layers have its window.
    """
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
            before = nodes[f"{layer}.{norm}"]
            taken = nodes[f"{layer}.{norm}.rms"].input_value(0)
            weight = before.input_value(1)
            _feed(before.output(0), taken)
            given = nodes[f"{layer}.{sublayer}"].output(0)
            readers = given.get_target_inputs()
            normed = _rms_norm(given, weight, epsilon)
            for reader in readers:
                reader.replace_source_output(normed)


def _feed(output: Any, value: Any) -> None:
    """Let every reader of `output` read `value`."""
    for reader in output.get_target_inputs():
        reader.replace_source_output(value)


def _rms_norm(given: Any, weight: Any, epsilon: np.float32) -> Any:
    """Output of the form of `given`, divided by its root mean square and times `weight`."""
    from openvino import opset13

    squares = opset13.reduce_mean(opset13.power(given, np.float32(2)), np.array([-1]), True)
    root = opset13.sqrt(opset13.add(squares, epsilon))
    scaled = opset13.multiply(given, opset13.power(root, np.float32(-1)))
    return opset13.multiply(scaled, weight).output(0)
