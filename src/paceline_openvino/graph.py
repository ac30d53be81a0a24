"""Reads an exported OpenVINO language model as the graph that the engine runs.

Attention becomes PagedAttention with the KV cache in tensors of the engine, and the head computes
only selected rows.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ModelError
from paceline_openvino.library import core, openvino, reason_of

GRAPH = "openvino_model.xml"

OUTPUT_ROWS = "sampled_tokens_indices"
"""Input: [n] int64, the n rows of the call that get logits (OpenVINO GenAI's name)."""

_RECURRENT = {"PagedCausalConv1D", "PagedGatedDeltaNet"}
_INPUTS = {"input_ids", "beam_idx"}
_POSITIONS = "position_ids"
_AFTER_HEAD = {"Convert", "Multiply", "Divide", "Add", "Tanh", "Reshape"}
_CONSTANT = re.compile(rb'offset="(\d+)" size="(\d+)"')


def paged_model(path: Path) -> Any:
    """Read a stateful model and transform it; see the top of this file.

    Raises ModelError if the file cannot be read, or is not a decoder of a supported form.
    """
    check_whole(path)
    openvino()
    from openvino._offline_transformations import paged_attention_transformation

    try:
        model = core().read_model(path)
    except RuntimeError as error:
        raise ModelError(
            f"{path} cannot be read as an OpenVINO model ({reason_of(error)}); export it again"
        ) from error
    names = {name for port in model.inputs for name in port.names}
    if not names >= _INPUTS or not model.get_sinks():
        raise ModelError(
            f"{path} is not a stateful language model (inputs: {', '.join(sorted(names))}); export "
            "it with task text-generation-with-past"
        )
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise _unsupported(path, f"attention is not PagedAttention ({reason_of(error)})") from error
    if model.get_sinks() or _RECURRENT & {node.get_type_name() for node in model.get_ops()}:
        raise _unsupported(path, "it has recurrent layers")
    for port in model.inputs:
        if _POSITIONS in port.names:  # those of the transformation have several names
            port.node.output(0).set_names({_POSITIONS})
    if not any(_POSITIONS in port.names and port.get_target_inputs() for port in model.inputs):
        # The count would be of the tokens of a call, and so that of each sequence's first row.
        raise _unsupported(path, f"it counts positions itself, without {_POSITIONS}")
    _gather_before_head(model, path)
    model.validate_nodes_and_infer_types()
    return model


def check_whole(path: Path) -> None:
    """Raise ModelError for a truncated graph or truncated weights."""
    weights = path.with_suffix(".bin")
    try:
        graph = path.read_bytes()
        size = weights.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror or error}") from error
    if not graph.rstrip().endswith(b"</net>"):
        raise ModelError(f"{path} is not a complete OpenVINO graph (truncated?); fetch it again")
    end = max((int(at) + int(length) for at, length in _CONSTANT.findall(graph)), default=0)
    if end > size:
        raise ModelError(
            f"{weights} has {size} bytes but the graph needs {end} (truncated?); "
            "fetch or export it again"
        )


def _gather_before_head(model: Any, path: Path) -> None:
    """Compute the head for `OUTPUT_ROWS` only."""
    from openvino import opset13

    node = model.output("logits").node.input_value(0).get_node()
    while node.get_type_name() in _AFTER_HEAD:
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul":
        raise _unsupported(path, f"its head is a {node.get_type_name()}, expected a MatMul")
    rows = opset13.parameter([-1], np.int64, name=OUTPUT_ROWS)
    rows.output(0).set_names({OUTPUT_ROWS})
    gathered = opset13.gather(node.input_value(0), rows, opset13.constant(np.int64(0)))
    node.input(0).replace_source_output(gathered.output(0))
    model.add_parameters([rows])


def _unsupported(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path} is a graph that the engine openvino does not run: {why}; use a GGUF file of the "
        "model"
    )
