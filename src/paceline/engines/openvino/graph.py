"""Transforms an exported OpenVINO language model into the graph that the engine runs.

Attention becomes PagedAttention with the KV cache in tensors of the engine, the head computes only
selected rows, and hidden states after tapped layers become outputs.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.decoding.types import tap_name
from paceline.engines.openvino.positions import POSITIONS, read_positions
from paceline.engines.openvino.visual import join_embeddings
from paceline.errors import ModelError
from paceline.storage.openvino import EMBEDDINGS, LANGUAGE, core, reason_of

OUTPUT_ROWS = "sampled_tokens_indices"
"""Input: [n] int64, the n rows of the call that get logits (OpenVINO GenAI's name)."""

BY_ROW = ".by_row"
"""Ends the names of inputs that describe every row of the call as a sequence of its own.

Layers with a sliding window read these: once the window is full, a row's bits in PagedAttention
depend on where its sequence begins in the call."""

STATES = "la."
"""Begins the names of inputs that describe the sequences of a call to recurrent layers ('linear
attention' in OpenVINO)."""

STATE_TABLES = ("conv_state_table.", "gated_delta_state_table.")
"""Prefixes of inputs with the states of recurrent layers, [blocks, ...] float32."""

_RECURRENT = {"PagedCausalConv1D", "PagedGatedDeltaNet"}
_BEGINS = "subsequence_begins"


def paged_model(path: Path, taps: Sequence[int] = ()) -> Any:
    """Read a stateful model and transform it; see the top of this file.

    Raises ModelError if the file cannot be read, or is not a decoder of a supported form.
    """
    from openvino._offline_transformations import paged_attention_transformation

    try:
        model = core().read_model(path)
        if path.name == LANGUAGE:
            model = join_embeddings(model, core().read_model(path.with_name(EMBEDDINGS)), path)
    except RuntimeError as error:
        raise ModelError(
            f"{path} cannot be read as an OpenVINO model ({reason_of(error)}); convert it again"
        ) from error
    names = {name for port in model.inputs for name in port.names}
    if not {"input_ids", "beam_idx"} <= names or not model.get_sinks():
        raise ModelError(
            f"{path} is not a stateful language model (inputs: {', '.join(sorted(names))}); export "
            "it with task text-generation-with-past"
        )
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise ModelError(
            f"{path}: attention cannot be replaced by PagedAttention ({reason_of(error)}); "
            "the openvino engine does not support this architecture"
        ) from error
    left = [sink.get_variable_id() for sink in model.get_sinks()]
    if left:
        raise ModelError(
            f"{path} has recurrent states of a kind that the openvino engine does not know "
            f"({left[0]} and {len(left) - 1} more); it knows short convolutions and gated delta "
            "rules"
        )
    read_positions(model)
    for port in model.inputs:
        if POSITIONS in port.names:  # those of the transformation have several names
            port.node.output(0).set_names({POSITIONS})
    _separate_recurrent(model)
    hidden = _gather_before_head(model, path)
    if taps:
        _add_taps(model, hidden, taps, path)
    model.validate_nodes_and_infer_types()
    return model


def _separate_recurrent(model: Any) -> None:
    """Give recurrent layers their own division of the rows into sequences.

    Attention takes decode rows one by one, recurrent layers take a block as one sequence.
    """
    import numpy as np
    from openvino import opset13

    layers = [node for node in model.get_ordered_ops() if node.get_type_name() in _RECURRENT]
    if layers:
        begins = opset13.parameter([-1], np.int32, name=STATES + _BEGINS)
        begins.output(0).set_names({STATES + _BEGINS})
        model.add_parameters([begins])
        shared = model.input(_BEGINS)
        for place in (place for node in layers for place in node.inputs()):
            if place.get_source_output() == shared:
                place.replace_source_output(begins.output(0))


def _gather_before_head(model: Any, path: Path) -> Any:
    """Compute the head for `OUTPUT_ROWS` only; returns the head's former input, [tokens, 1, d]."""
    import numpy as np
    from openvino import opset13

    node = model.output("logits").node.input_value(0).get_node()
    while node.get_type_name() in {"Convert", "Multiply", "Divide", "Add", "Tanh", "Reshape"}:
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul":
        raise ModelError(f"{path}: the head is a {node.get_type_name()}, expected a MatMul")
    hidden = node.input_value(0)
    rows = opset13.parameter([-1], np.int64, name=OUTPUT_ROWS)
    rows.output(0).set_names({OUTPUT_ROWS})
    gathered = opset13.gather(hidden, rows, opset13.constant(np.int64(0)))
    node.input(0).replace_source_output(gathered.output(0))
    model.add_parameters([rows])
    return hidden


def _add_taps(model: Any, hidden: Any, taps: Sequence[int], path: Path) -> None:
    """Add outputs `tap_name(layer)`: [tokens, 1, d] float32, hidden states after layers `taps`."""
    from openvino import opset13

    layers = _layer_outputs(model, hidden, path)
    for tap in taps:
        if not 0 <= tap < len(layers):
            raise ModelError(f"{path} has {len(layers)} layers; there is no layer {tap} to tap")
        result = opset13.result(layers[tap], name=tap_name(tap))
        result.output(0).set_names({tap_name(tap)})
        model.add_results([result])


def _layer_outputs(model: Any, hidden: Any, path: Path) -> list[Any]:
    """The residual stream after the layers, in order.

    The stream is a chain of sums x + f(x), two per layer: attention, then feed-forward. Exporters
    name them differently, so this finds them by form: sums of two computed tensors as wide as the
    head's input, in execution order.
    """
    width = hidden.partial_shape[-1]
    sums = [
        node.output(0)
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Add"
        and node.get_output_partial_shape(0).rank.get_length() == 3
        and all(
            node.input_value(i).get_node().get_type_name() != "Constant"
            and node.get_input_partial_shape(i)[-1] == width
            for i in (0, 1)
        )
    ]
    kinds = Counter(node.get_type_name() for node in model.get_ordered_ops())
    # A layer with a delta rule has a convolution as well.
    recurrent = kinds["PagedGatedDeltaNet"] or kinds["PagedCausalConv1D"]
    layers = kinds["PagedAttentionExtension"] + recurrent
    if len(sums) != 2 * layers:
        raise ModelError(
            f"{path} has {layers} layers and {len(sums)} residual sums, expected two a layer; its "
            "layers cannot be tapped"
        )
    return sums[1::2]
