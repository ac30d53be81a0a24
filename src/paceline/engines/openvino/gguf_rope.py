"""Mends rotary positions where OpenVINO 2026.4's GGUF frontend computes others than the model.

Found by comparing tiny models with transformers (tests/conformance/test_gguf_families.py): it
leaves out the factors of Llama 3 and LongRoPE and Gemma 3's linear scaling, rotates pairs and not
halves in qwen3moe, rotates the layers of SmolLM3 and EXAONE 4 that have no positions, normalizes
queries and keys of Hunyuan before the rotation instead of after it, takes Ministral's YaRN for
another's, and takes the rows of a single key head for heads.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.storage.gguf_file import GgufFile

Floats = npt.NDArray[np.float32]

_NODE = re.compile(r"(blk\.\d+\.\w+|rope_cos|rope_sin|inp_pos)$")
_GEMMA3_BASE = 10_000.0
"""Base of Gemma 3's layers with a window, where the file does not say it."""
_SMOLLM3_PERIOD = 4


def fix_positions(model: Any, file: GgufFile, windowed: Sequence[bool]) -> None:
    """Mend the frontend's graph `model` of `file`.

    `windowed` says by layer whether it has a sliding window. Raises RuntimeError for a graph
    without the nodes that are fixed.
    """
    family = file.fields.get("general.architecture")
    nodes = {
        match[1]: node
        for node in model.get_ordered_ops()
        if (match := _NODE.search(node.get_friendly_name()))
    }
    graph = _Graph(nodes)
    for name in [name for name in nodes if name.endswith(("Qcur", "Kcur"))]:
        graph.separate_heads(name)
    model.validate_nodes_and_infer_types()
    rope = _Rope(file, str(family))
    for layer in _without_positions(str(family), windowed):
        graph.leave_unrotated(layer)
    factors = _factors(file, rope)
    if factors is not None:
        cos, sin = graph.table(rope.frequencies() / factors, rope.number("scaling.attn_factor", 1))
        graph.node("rope_cos").output(0).replace(cos)
        graph.node("rope_sin").output(0).replace(sin)
    if family == "qwen3moe":
        table = graph.table(rope.frequencies())
        graph.rotate([table] * len(windowed))
    elif family == "gemma3":
        near = graph.table(rope.frequencies(rope.number("freq_base_swa", _GEMMA3_BASE)))
        linear = rope.field("scaling.type") == "linear"
        far = graph.table(rope.frequencies() / (rope.number("scaling.factor", 1) if linear else 1))
        graph.rotate([near if is_windowed else far for is_windowed in windowed])
    elif family == "mistral3":
        _fix_ministral(graph, rope, len(windowed))
    elif family == "hunyuan-dense":
        for layer in range(len(windowed)):
            for name in (f"blk.{layer}.Qcur", f"blk.{layer}.Kcur"):
                graph.rotate_before_norm(name)


def _without_positions(family: str, windowed: Sequence[bool]) -> list[int]:
    """Layers that do not rotate: every fourth of SmolLM3, and EXAONE 4's among those with a window.

    An EXAONE 4 without windows rotates in all.
    """
    layers = range(len(windowed))
    if family == "smollm3":
        return [*layers[_SMOLLM3_PERIOD - 1 :: _SMOLLM3_PERIOD]]
    if family == "exaone4" and any(windowed):
        return [layer for layer in layers if not windowed[layer]]
    return []


def _fix_ministral(graph: "_Graph", rope: "_Rope", layers: int) -> None:
    """Rotate without YaRN's usual scale, and scale queries after the first training length.

    The scale 1 + 0.1 ln(factor) is divided by itself where the file has a yarn_log_multiplier; a
    query at position p is multiplied by 1 + beta ln(1 + floor(p / length)), as in Llama 4.
    """
    factor = rope.number("scaling.factor", 1)
    if rope.field("scaling.yarn_log_multiplier") and factor > 1:
        for name in ("rope_cos", "rope_sin"):
            graph.multiply(name, np.float32(1 / (1 + 0.1 * math.log(factor))))
    beta = rope.file.fields.get(f"{rope.family}.attention.temperature_scale", 0)
    if beta:
        scale = graph.temperature(beta, rope.number("scaling.original_context_length", 1))
        for layer in range(layers):
            graph.multiply(f"blk.{layer}.Qcur_rope", scale)


class _Rope(NamedTuple):
    """What a file says about positions."""

    file: GgufFile
    family: str

    def field(self, name: str, default: Any = None) -> Any:
        return self.file.fields.get(f"{self.family}.rope.{name}", default)

    def number(self, name: str, default: float) -> float:
        value = self.field(name, default)
        return float(value) if isinstance(value, int | float) else default

    def frequencies(self, base: float | None = None) -> Floats:
        """[pairs] float32: base ** (-2 i / rotated values), radians per position."""
        base = self.number("freq_base", 10_000.0) if base is None else base
        fields = self.file.fields
        head = fields.get(f"{self.family}.attention.key_length") or (
            fields[f"{self.family}.embedding_length"]
            // fields[f"{self.family}.attention.head_count"]
        )
        rotated = int(self.number("dimension_count", head))
        places = np.arange(0, rotated, 2, dtype=np.float64) / rotated
        return (base**-places).astype(np.float32)


def _factors(file: GgufFile, rope: _Rope) -> Floats | None:
    """[pairs]: divisors of the frequencies, of Llama 3 or LongRoPE.

    LongRoPE has factors for texts within the length that the model was first trained on, and others
    for longer ones. As in llama.cpp, the context decides, not the text: a token's rotation would
    otherwise change while an answer grows.
    """
    tensors = {tensor.name: tensor for tensor in file.tensors}
    context = file.fields.get(f"{rope.family}.context_length", 0)
    long = context > rope.number("scaling.original_context_length", context)
    names = ("rope_freqs.weight", f"rope_factors_{'long' if long else 'short'}.weight")
    for name in names if rope.family in ("exaone4", "llama", "phi3") else ():
        if name in tensors:
            return tensors[name].data.view(np.float32)
    return None


class _Graph:
    """The frontend's nodes by the ends of their names."""

    def __init__(self, nodes: dict[str, Any]) -> None:
        self._nodes = nodes

    def node(self, name: str) -> Any:
        if name not in self._nodes:
            raise RuntimeError(f"its graph has no {name}, by which positions are fixed")
        return self._nodes[name]

    def separate_heads(self, name: str) -> None:
        """Give the product of a single head, [1, 1, n, size], the form of several, [1, n, 1, size].

        The frontend has a node `_r` that does so, before norm and rotation, for several heads
        alone. Without it, a rotation broadcasts all rows of the head over the positions of all.
        """
        from openvino import opset13

        if f"{name}_r" in self._nodes:
            return
        output = (self._nodes.get(f"{name}_b") or self._nodes[name]).output(0)
        readers = output.get_target_inputs()
        size, rotated = (
            port.get_partial_shape()[3].get_length()
            for port in (output, self.node(f"{name}_rope").output(0))
        )
        if size != rotated:
            raise RuntimeError(f"its graph has no {name}_r, which divides {size} values into heads")
        heads = opset13.reshape(output, np.array([1, -1, 1, size]), False)
        for reader in readers:
            reader.replace_source_output(heads.output(0))
        self._nodes[f"{name}_r"] = heads

    def table(self, frequencies: Floats, scale: float = 1.0) -> tuple[Any, Any]:
        """Outputs cos and sin, [1, n, 1, pairs], times `scale`."""
        return rotation(self._positions(), frequencies, scale)

    def leave_unrotated(self, layer: int) -> None:
        """Give queries and keys of a layer to attention as they were before the rotation."""
        for name in (f"blk.{layer}.Qcur", f"blk.{layer}.Kcur"):
            before = self._nodes.get(f"{name}_normed") or self.node(f"{name}_r")
            self.node(f"{name}_rope").output(0).replace(before.output(0))

    def temperature(self, beta: float, length: float) -> Any:
        """Output [1, n, 1, 1]: what queries at their positions are multiplied by."""
        from openvino import opset13

        whole = opset13.floor(opset13.divide(self._positions(), np.float32(length)))
        logs = opset13.log(opset13.add(whole, np.float32(1)))
        return opset13.add(opset13.multiply(logs, np.float32(beta)), np.float32(1)).output(0)

    def _positions(self) -> Any:
        """The rows' positions, [1, n, 1, 1] float32."""
        from openvino import opset13

        places = opset13.convert(self.node("inp_pos"), "f32")
        return opset13.transpose(places, np.array([0, 3, 1, 2]))

    def multiply(self, name: str, by: Any) -> None:
        """Multiply what the node `name` gives to its readers."""
        from openvino import opset13

        output = self.node(name).output(0)
        readers = output.get_target_inputs()
        product = opset13.multiply(output, by).output(0)
        for reader in readers:
            reader.replace_source_output(product)

    def rotate(self, tables: Sequence[tuple[Any, Any]]) -> None:
        """Rotate the halves of queries and keys by the tables, one per layer."""
        for layer, table in enumerate(tables):
            for name in (f"blk.{layer}.Qcur", f"blk.{layer}.Kcur"):
                normed = self.node(f"{name}_normed").output(0)
                self.node(f"{name}_rope").output(0).replace(rotate_halves(normed, *table))

    def rotate_before_norm(self, name: str) -> None:
        """Let the rotation read what its norm read, and the norm what the rotation gave."""
        ends = ("_r", "_normed", "_rope")
        plain, normed, rotated = (self.node(name + end).output(0) for end in ends)
        readers = rotated.get_target_inputs()
        of_norm, of_rope = plain.get_target_inputs(), normed.get_target_inputs()
        for reader in of_rope:
            reader.replace_source_output(plain)
        for reader in of_norm:
            reader.replace_source_output(rotated)
        for reader in readers:
            reader.replace_source_output(normed)


def rotation(positions: Any, frequencies: Floats, scale: float = 1.0) -> tuple[Any, Any]:
    """Outputs cos and sin, [1, n, 1, pairs], times `scale`.

    `positions` is [1, n, 1, 1] float32, `frequencies` [pairs] in radians per position.
    """
    from openvino import opset13

    angles = opset13.multiply(positions, frequencies.reshape(1, 1, 1, -1))
    cos, sin = (
        opset13.multiply(wave, np.float32(scale)).output(0)
        for wave in (opset13.cos(angles), opset13.sin(angles))
    )
    return cos, sin


def rotate_halves(rows: Any, cos: Any, sin: Any) -> Any:
    """Rotate [1, n, heads, size] by value i and i + size / 2 as a pair."""
    from openvino import opset13

    pairs = int(cos.get_partial_shape()[3].get_length())
    first, second = opset13.variadic_split(rows, np.int64(3), np.array([pairs, -1])).outputs()
    parts = [
        opset13.subtract(opset13.multiply(first, cos), opset13.multiply(second, sin)),
        opset13.add(opset13.multiply(second, cos), opset13.multiply(first, sin)),
    ]
    return opset13.concat(parts, 3).output(0)
