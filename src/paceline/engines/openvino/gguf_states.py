"""Puts the states of recurrent layers into state blocks, in graphs of OpenVINO's GGUF frontend.

A layer of Qwen3.5 with linear attention has a short convolution and a gated delta rule. The
frontend's graph takes their states of one sequence before the call, and returns those after it.
"""

import re
from typing import Any

import numpy as np

from paceline.engines.openvino.paged import Inputs, gated_delta_rule, short_convolution

_NODE = re.compile(r"blk\.(\d+)\.(qkv_mixed|conv_out|gdn_attn)$")
_RULE, _WEIGHT = "GatedDeltaNet", "weight.weight_blk.{}.ssm_conv1d.weight"


def page_states(model: Any, inputs: Inputs) -> None:
    """Replace the convolutions and the delta rules of all layers that have them."""
    from openvino import opset13

    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
    named = {
        (int(match[1]), match[2]): node
        for name, node in nodes.items()
        if (match := _NODE.search(name))
    }
    rules = [node for node in nodes.values() if node.get_type_name() == _RULE]
    layers = sorted(layer for layer, name in named if name == "gdn_attn")
    for layer, rule in zip(layers, rules, strict=True):
        weight = _values(nodes[_WEIGHT.format(layer)])
        rows = named[layer, "qkv_mixed"].output(0)
        convolved = short_convolution(inputs, rows, weight, layer)
        four = opset13.reshape(convolved, np.array([1, 1, -1, len(weight)]), False)
        named[layer, "conv_out"].output(0).replace(four.output(0))
        *qkv, _state, gate, beta = rule.input_values()[:6]
        attended = gated_delta_rule(inputs, rule, [*qkv, gate, beta], layer)
        five = opset13.unsqueeze(attended, np.int64(0))
        named[layer, "gdn_attn"].output(0).replace(five.output(0))


def _values(node: Any) -> Any:
    """[channels, kernel] float32."""
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return node.get_data().astype(np.float32)
