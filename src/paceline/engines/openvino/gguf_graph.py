"""Opens a GGUF file as the graph that the engine runs: through OpenVINO's GGUF frontend, mostly.

The frontend's graph is stateless: it takes the whole KV cache and a mask, and returns the cache
with the new rows. Here every attention becomes PagedAttention, so that cache and mask go, and the
inputs are those of an exported model (`graph.py`). The weights keep the file's 4 to 8 bits.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.types import FINAL_NORM, tap_name
from paceline.engines.openvino.blocks import Built
from paceline.engines.openvino.gguf_rope import fix_positions
from paceline.engines.openvino.gguf_rows import make_rows_invariant
from paceline.engines.openvino.gguf_states import page_states
from paceline.engines.openvino.gguf_values import fix_values
from paceline.engines.openvino.gguf_weights import exact_zero_points, regroup_six_bits
from paceline.engines.openvino.graph import OUTPUT_ROWS
from paceline.engines.openvino.lfm2 import lfm2
from paceline.engines.openvino.paged import Heads, Inputs, attention
from paceline.engines.openvino.qwen35_moe import qwen35moe
from paceline.errors import ModelError
from paceline.storage.gguf import graph_fault, read_gguf_graph
from paceline.storage.gguf_file import GgufFile, read_gguf
from paceline.storage.openvino import reason_of

_BUILT = {"lfm2": lfm2, "lfm2moe": lfm2, "qwen35moe": qwen35moe}
"""`general.architecture` of graphs that are built here, as the frontend does not know them."""
_INPUTS = {"inp_tokens": "input_ids", "inp_pos": "position_ids", "inp_out_ids": OUTPUT_ROWS}
"""The frontend's inputs that stay -> their names here."""
_CACHE = re.compile(r"cache_[kv]_l(\d+)")
_LAYER_OUTPUT = re.compile(r"blk\.(\d+)\.l_out$")
_RECURRENT = "gguf_recurrent_states"
_SECTIONS = "gguf_is_imrope"
"""Its positions are four: of text, and of time, height and width in an image. Those of text are all
the same."""
_COMPUTED = "PagedAttention computes, which excludes capped scores"
_WINDOW = "gguf_swa_window_size"
_WINDOWED_MASK = "self_kq_mask_swa"


def gguf_model(path: Path, taps: Sequence[int] = ()) -> Any:
    """Read a GGUF file as a model with PagedAttention; see the top of this file.

    Raises ModelError if its architecture or weights are unknown, or if it has an attention that
    PagedAttention does not compute, such as one with capped scores.
    """
    import openvino as ov

    file = read_gguf(path)
    inputs = Inputs()
    build = _BUILT.get(str(file.fields.get("general.architecture")))
    try:
        built = build(file, path, inputs) if build else _of_frontend(file, path, inputs, taps)
    except RuntimeError as error:  # an unknown graph, or a node whose inputs do not fit
        raise graph_fault(path, reason_of(error)) from error
    if not inputs.has_attention:
        raise graph_fault(path, f"no layer has attention that {_COMPUTED}")
    results = [_result(built.logits, "logits")]
    for tap in taps:
        if tap == FINAL_NORM and tap not in built.layers:
            raise ModelError(f"{path}: embeddings of its family are not supported")
        if tap not in built.layers:
            count = len(built.layers)
            raise ModelError(f"{path} has {count} layers; there is no layer {tap} to tap")
        results.append(_result(built.layers[tap], tap_name(tap)))
    try:
        model = ov.Model(results, inputs.parameters, path.stem)
    except RuntimeError as error:  # the logits still depend on an input of the frontend's
        raise graph_fault(path, f"a layer has no attention that {_COMPUTED}") from error
    exact_zero_points(model, file)
    make_rows_invariant(model)
    return model


def _of_frontend(file: GgufFile, path: Path, inputs: Inputs, taps: Sequence[int]) -> Built:
    """The frontend's graph, fixed, with PagedAttention."""
    from openvino import opset13

    source = read_gguf_graph(path)
    about = source.get_rt_info()
    window = int(about[_WINDOW].value) if _WINDOW in about else 0
    attentions = [
        node
        for node in source.get_ordered_ops()
        if node.get_type_name() == "ScaledDotProductAttention"
    ]
    fix_positions(source, file, [window > 0 and _is_windowed(node) for node in attentions])
    fix_values(source, file, path)
    regroup_six_bits(source)
    for old in source.get_parameters():
        if new := _INPUTS.get(old.get_friendly_name()):
            parameter = inputs.take(new)
            if new == "position_ids" and _SECTIONS in about and about[_SECTIONS].value:
                parameter = opset13.tile(parameter, np.array([4]))
            four = opset13.reshape(parameter, np.array([1, 1, 1, -1]), False)
            old.output(0).replace(four.output(0))
    if _RECURRENT in about:
        page_states(source, inputs)
    for node in attentions:
        _page(node, inputs, window if _is_windowed(node) else 0)
    layers = {
        int(match[1]): node.output(0)
        for node in source.get_ordered_ops()
        if (match := _LAYER_OUTPUT.search(node.get_friendly_name()))
    }
    logits = source.outputs[0].get_node().input_value(0)
    last = max(layers)
    if FINAL_NORM in taps:
        layers[FINAL_NORM] = _head_input(logits, path)
        _gather_after(layers[FINAL_NORM], inputs)
    elif last in taps:
        _gather_after(layers[last], inputs)
    return Built(logits, layers)


def _head_input(logits: Any, path: Path) -> Any:
    """The input of the head's product: the hidden states after the last norm."""
    node = logits.get_node()
    while node.get_type_name() != "MatMul":
        if not node.get_input_size():
            raise ModelError(f"{path} has no head whose input could be embeddings")
        node = node.input_value(0).get_node()
    return node.input_value(0)


def _page(node: Any, inputs: Inputs, window: int) -> None:
    """Replace a ScaledDotProductAttention, with the cache writes before it, by PagedAttention."""
    query = _before(node.input_value(0), "Transpose", "Convert")
    key, value = (_written(node.input_value(i)) for i in (1, 2))
    heads = int(query.get_partial_shape()[2].get_length())
    sinks = None
    if node.get_input_size() > 5:
        values = _before(node.input_value(5), "Reshape", "Convert").get_node().get_data()
        sinks = values.astype(np.float32)
    paged = attention(
        inputs,
        Heads(query, heads, key.size),
        key,
        value,
        _scale(float(node.input_value(4).get_node().get_data())),
        window=window,
        sinks=sinks,
    )
    _after(node, "Transpose", "Convert").replace(paged)


def _is_windowed(attention: Any) -> bool:
    mask = _before(attention.input_value(3), "Convert", "Slice", "Convert").get_node()
    return bool(mask.get_friendly_name() == _WINDOWED_MASK)


def _before(output: Any, *kinds: str) -> Any:
    """What `output` is computed from, before nodes of these kinds, the last first."""
    for kind in kinds:
        if output.get_node().get_type_name() == kind:
            output = output.get_node().input_value(0)
    return output


def _after(node: Any, *kinds: str) -> Any:
    """The output of the last node of these kinds, in this order, after `node`."""
    for kind in kinds:
        (target,) = node.output(0).get_target_inputs()
        node = target.get_node()
        if node.get_type_name() != kind:
            raise RuntimeError(f"a {node.get_type_name()} reads attention, expected a {kind}")
    return node.output(0)


def _written(output: Any) -> Heads:
    """Find the cache behind an input of attention: the heads of grouped queries are repeated."""
    repeated = ("Reshape", "Broadcast", "Unsqueeze")
    node = _before(output, "Transpose", "ConvertLike", *repeated).get_node()
    name = node.input_value(0).get_node().get_friendly_name() if node.get_input_size() else ""
    match = _CACHE.fullmatch(name)
    if node.get_type_name() != "ScatterUpdate" or not match:
        raise RuntimeError(f"an attention reads a {node.get_type_name()}, expected the KV cache")
    shape = list(node.get_output_partial_shape(0))
    heads, size = (int(dimension.get_length()) for dimension in shape[2:])
    rows = _before(node.input_value(2), "Reshape", "Convert")
    return Heads(rows, heads, size, int(match[1]))


def _scale(stored: float) -> float:
    """The scale of attention, which the frontend stores as f16: 1 / sqrt(n), for a whole n."""
    exact = 1 / math.sqrt(max(round(1 / stored**2), 1))
    return exact if np.float16(exact) == np.float16(stored) else stored


def _gather_after(last: Any, inputs: Inputs) -> None:
    """Compute `last` for all rows, and select those with logits after it."""
    from openvino import opset13

    output_rows = inputs.take(OUTPUT_ROWS)
    (narrow,) = output_rows.output(0).get_target_inputs()
    tokens = opset13.shape_of(inputs.take("input_ids"), "i32")
    count = opset13.squeeze(tokens, np.array([0]))
    all_rows = opset13.range(np.int32(0), count, np.int32(1), "i32")
    narrow.replace_source_output(all_rows.output(0))
    targets = last.get_target_inputs()
    gathered = opset13.gather(last, output_rows, np.int64(2))
    for target in targets:
        target.replace_source_output(gathered.output(0))


def _result(output: Any, name: str) -> Any:
    from openvino import opset13

    result = opset13.result(output, name=name)
    result.output(0).set_names({name})
    return result
