"""The operations that read and write state which outlives a call, and the inputs that they share.

Attention has the keys and values of earlier rows in KV blocks. A short convolution and a gated
delta rule have a state of fixed size in state blocks, numbered by `la.*`: there, all rows of a
sequence are one sequence, while attention gets some rows as sequences of their own.

OpenVINO 2026.4 makes PagedCausalConv1D and PagedGatedDeltaNet from patterns alone, in the pass that
makes PagedAttention. So they are taken out of template models that have gone through that pass, and
then get their real inputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.engines.openvino.graph import BY_ROW, STATE_TABLES

_CONV, _DELTA = STATE_TABLES

_SEQUENCES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
_STATES = (
    *("la.subsequence_begins", "la.block_indices", "la.block_indices_begins"),
    *("la.past_lens", "la.cache_interval"),
)


class Inputs:
    """The graph's inputs, created at their first use."""

    def __init__(self) -> None:
        self._parameters: dict[str, Any] = {}

    @property
    def parameters(self) -> list[Any]:
        """Their nodes."""
        return list(self._parameters.values())

    @property
    def has_attention(self) -> bool:
        """Whether the graph reads a KV cache."""
        return any(name.startswith("key_cache.") for name in self._parameters)

    def take(self, name: str, rank: int = 1) -> Any:
        """The int32 input `name`."""
        return self._take(name, np.int32, [-1] * rank)

    def cache(self, name: str) -> Any:
        """The KV cache `name`: the plugin chooses its type and shape."""
        from openvino import Type

        return self._take(name, Type.dynamic, [-1] * 4)

    def states(self, name: str, *sizes: int) -> Any:
        """The states `name`, [blocks, *sizes] float32."""
        return self._take(name, np.float32, [-1, *sizes])

    def _take(self, name: str, kind: Any, shape: Sequence[int]) -> Any:
        from openvino import opset13

        if name not in self._parameters:
            node = opset13.parameter(list(shape), kind, name=name)
            node.output(0).set_names({name})
            self._parameters[name] = node
        return self._parameters[name]


class Heads(NamedTuple):
    """Queries, keys or values of the call's rows."""

    rows: Any
    """Output, float32 of rows * heads * size, in any shape."""
    heads: int
    size: int
    layer: int = 0
    """Of keys and values: number of their KV cache. Layers may share one."""


def attention(
    inputs: Inputs,
    query: Heads,
    key: Heads,
    value: Heads,
    scale: float,
    *,
    window: int = 0,
    sinks: npt.NDArray[np.float32] | None = None,
) -> Any:
    """Output [1, rows, query.heads, value.size] of PagedAttention.

    `window` is its sliding window in tokens, 0: none. `sinks` has a logit per head.
    """
    from openvino import opset13
    from openvino.op import _PagedAttentionExtension

    flat = [
        opset13.reshape(part.rows, np.array([-1, part.heads * part.size]), False)
        for part in (query, key, value)
    ]
    none = np.zeros(0, np.int32)
    off = np.int32(0)
    empty = np.zeros((0, 0, 0, 0), np.float32)
    arguments = [
        *flat,
        inputs.cache(f"key_cache.{key.layer}"),
        inputs.cache(f"value_cache.{value.layer}"),
        *(inputs.take(name + BY_ROW * (window > 0)) for name in _SEQUENCES),
        np.float32(scale),
        np.int32(window),
        np.zeros(0, np.float32),  # ALiBi slopes
        inputs.take("max_context_len", rank=0),
        none,  # score aggregation window
        *(none, none, np.zeros(0, np.float32)),  # rotation of cached keys
        *(np.zeros(0, np.float32), off, off),  # XAttention
        empty if sinks is None else sinks.reshape(1, query.heads, 1, 1),
        *(off, none, none, none),  # adaptive eviction
        *(none, np.zeros(0, np.uint8), none),  # token types, and a mask between the call's rows
    ]
    paged = _PagedAttentionExtension([_output(argument) for argument in arguments])
    about = paged.get_rt_info()
    about["k_head_size"], about["num_k_heads"] = key.size, key.heads
    about["v_head_size"], about["num_v_heads"] = value.size, value.heads
    shape = np.array([1, -1, query.heads, value.size])
    return opset13.reshape(paged.output(0), shape, False).output(0)


def short_convolution(
    inputs: Inputs, rows: Any, weight: npt.NDArray[np.float32], layer: int
) -> Any:
    """Output [rows, channels]: for every channel, the weighted sum over the last `kernel` rows.

    Args:
        inputs: of the graph.
        rows: output, float32 of rows * channels.
        weight: [channels, kernel], of the current row last.
        layer: number of the states.
    """
    from openvino import opset13

    channels, kernel = weight.shape
    operation = _convolution_template(channels, kernel)
    operation.set_arguments(
        [
            opset13.reshape(rows, np.array([-1, channels]), False).output(0),
            inputs.states(f"{_CONV}{layer}", channels, kernel).output(0),
            opset13.constant(weight.reshape(channels, 1, kernel)).output(0),
            opset13.constant(np.zeros(0, np.float32)).output(0),  # bias
            *_state_inputs(inputs),
        ]
    )
    operation.validate_and_infer_types()
    return operation.output(0)


def gated_delta_rule(inputs: Inputs, operation: Any, values: Sequence[Any], layer: int) -> Any:
    """Output [rows, heads, value size] of the gated delta rule.

    Args:
        inputs: of the graph.
        operation: a GatedDeltaNet, which loses its inputs.
        values: queries, keys and values, [1, rows, heads, size]; gates and betas, of rows * heads
            values.
        layer: number of the states.
    """
    from openvino import opset13

    partial_shapes = [list(value.get_partial_shape()) for value in values[:3]]
    shapes = [[int(size.get_length()) for size in shape[2:]] for shape in partial_shapes]
    heads, key_size = shapes[0]
    value_size = shapes[2][1]
    shapes += [[heads], [heads]]
    flat = [
        opset13.reshape(value, np.array([-1, *shape]), False).output(0)
        for value, shape in zip(values, shapes, strict=True)
    ]
    paged = _delta_template(operation, heads, key_size, value_size)
    states = inputs.states(f"{_DELTA}{layer}", heads, value_size, key_size)
    paged.set_arguments([*flat[:3], states.output(0), *flat[3:], *_state_inputs(inputs)])
    paged.validate_and_infer_types()
    return paged.output(0)


def _state_inputs(inputs: Inputs) -> list[Any]:
    return [inputs.take(name).output(0) for name in _STATES]


def _convolution_template(channels: int, kernel: int) -> Any:
    """A PagedCausalConv1D whose inputs are still to be set."""
    from openvino import opset13

    name = "template.past.conv.0"  # the pass looks for ".past.conv."
    rows = opset13.parameter([-1, channels, -1], np.float32)
    weight = opset13.parameter([channels, 1, 1, kernel], np.float32)
    start = opset13.constant(np.zeros((1, channels, kernel), np.float32))
    state = opset13.read_value(start, name, np.float32, [-1, channels, kernel])
    joined = opset13.concat([state, rows], -1)
    result = opset13.group_convolution(joined, weight, [1], [0], [0], [1])
    last, end, step, axis = (np.array([n]) for n in (-kernel, np.iinfo(np.int32).max, 1, 2))
    kept = opset13.assign(opset13.slice(joined, last, end, step, axis), name)
    result = opset13.slice(result, np.array([-1]), end, step, axis)
    return _after_the_pass([result.output(0)], [kept], [rows, weight], "PagedCausalConv1D")


def _delta_template(operation: Any, heads: int, key_size: int, value_size: int) -> Any:
    """A PagedGatedDeltaNet from the GatedDeltaNet `operation`; its inputs are still to be set."""
    from openvino import opset13

    name = "template.recurrent"
    sizes = (key_size, key_size, value_size)
    rows = [opset13.parameter([-1, -1, heads, size], np.float32) for size in sizes]
    gates = [opset13.parameter([-1, -1, heads], np.float32) for _ in range(2)]
    shape = [1, heads, key_size, value_size]
    start = opset13.constant(np.zeros(shape, np.float32))
    state = opset13.read_value(start, name, np.float32, [-1, *shape[1:]])
    operation.set_arguments([node.output(0) for node in (*rows, state, *gates)])
    operation.validate_and_infer_types()
    kept = opset13.assign(opset13.relu(operation.output(1)), name)  # it wants a node
    return _after_the_pass([operation.output(0)], [kept], [*rows, *gates], "PagedGatedDeltaNet")


def _after_the_pass(results: list[Any], sinks: list[Any], inputs: list[Any], kind: str) -> Any:
    """The node of a `kind` in a model that was transformed.

    Raises RuntimeError, with the reason, if the pass did not make one.
    """
    import openvino as ov
    from openvino import opset13
    from openvino._offline_transformations import paged_attention_transformation

    # The pass asks for token ids, and for an attention: this one stays as it is.
    tokens = opset13.parameter([-1, -1], np.int64, name="input_ids")
    tokens.output(0).set_names({"input_ids"})
    rows = opset13.parameter([1, 1, -1, 1], np.float32)
    attended = opset13.scaled_dot_product_attention(rows, rows, rows)
    model = ov.Model([*results, attended.output(0)], sinks, [tokens, rows, *inputs])
    paged_attention_transformation(model)
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == kind]
    if len(nodes) != 1:
        raise RuntimeError(f"this OpenVINO made no {kind}; paceline needs OpenVINO 2026.4")
    return nodes[0]


def _output(value: Any) -> Any:
    from openvino import opset13

    return (
        opset13.constant(value) if isinstance(value, np.ndarray | np.generic) else value
    ).output(0)
