"""The graph of Qwen3.5's mixtures of experts, which OpenVINO's GGUF frontend does not know.

Most layers have linear attention, a gated delta rule after a short convolution; the others have
attention with a gate. As in transformers' modeling_qwen3_5_moe.py, of the tensors and keys of
llama.cpp's GGUF files, where heads of values that share a head of keys are not side by side.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.engines.openvino.blocks import Blocks, Built, added, product
from paceline.engines.openvino.experts import ExpertProducts
from paceline.engines.openvino.frontend_operations import SQUARE, VECTOR, frontend_operations
from paceline.engines.openvino.gguf_about import About
from paceline.engines.openvino.gguf_matrix import floats
from paceline.engines.openvino.paged import Inputs, gated_delta_rule, short_convolution
from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile

_INTERVAL = 4
_ROPE_BASE = 10_000.0
_LEAST_SQUARE = np.float32(1e-6)
"""Added to the square of a query's or key's length, as in transformers."""


class _Heads(NamedTuple):
    """Sizes of linear attention."""

    keys: int
    values: int
    size: int
    """Of a query, a key and a value."""


def qwen35moe(file: GgufFile, path: Path, inputs: Inputs) -> Built:
    """Build the graph of `file`, at `path`. Raises ModelError for missing keys or tensors.

    Layers that predict the tokens after the next are left out.
    """
    about = About(file, path)
    count = about.count("block_count", most=len(file.tensors))
    further = about.count("nextn_predict_layers", 0, least=0, most=count - 1)
    heads = about.count("attention.head_count"), about.count("attention.head_count_kv")
    rotary, used = about.count("rope.dimension_count"), about.count("expert_used_count")
    interval = about.count("full_attention_interval", _INTERVAL)
    blocks = Blocks(
        *(file, path, inputs),
        epsilon=about.number("attention.layer_norm_rms_epsilon"),
        rope_base=about.number("rope.freq_base", _ROPE_BASE),
    )
    linear = _LinearAttention(blocks, inputs, _heads(about, path))
    products = ExpertProducts(count - further)
    rows, embeddings = blocks.embed("token_embd")
    layers = {}
    for layer in range(count - further):
        prefix = f"blk.{layer}."
        normed = blocks.norm(rows, f"{prefix}attn_norm")
        mixed = (
            linear.mix(normed, layer)
            if (layer + 1) % interval
            else blocks.attend(normed, layer, *heads, rotary=rotary, gated=True)
        )
        rows = added(rows, mixed)
        normed = blocks.norm(rows, f"{prefix}post_attention_norm")
        chosen = blocks.mixture(normed, layer, used, products, softmax=True)
        fed = added(chosen, blocks.shared_expert(normed, layer))
        rows = layers[layer] = added(rows, fed, f"{prefix}l_out")
    last = blocks.norm(blocks.output_rows(rows), "output_norm", "result_norm")
    logits = blocks.linear(last, "output") if blocks.has("output") else product(last, embeddings)
    return Built(logits, layers)


def _heads(about: About, path: Path) -> _Heads:
    heads = _Heads(
        about.count("ssm.group_count"),
        about.count("ssm.time_step_rank"),
        about.count("ssm.state_size"),
    )
    inner = about.count("ssm.inner_size")
    if heads.values % heads.keys or inner != heads.values * heads.size:
        raise ModelError(
            f"{path}: {about.arch}.ssm.* are {heads.keys} heads of keys, {heads.values} of values, "
            f"{heads.size} wide, and {inner} values in all, which do not fit together"
        )
    return heads


class _LinearAttention:
    """Makes the layers with a gated delta rule."""

    def __init__(self, blocks: Blocks, inputs: Inputs, heads: _Heads) -> None:
        self._blocks, self._inputs, self._heads = blocks, inputs, heads
        self._rule = _delta_rule()

    def mix(self, rows: Any, layer: int) -> Any:
        """What is added to the residual stream."""
        from openvino import opset13

        blocks, heads, prefix = self._blocks, self._heads, f"blk.{layer}."
        weight = floats(blocks.tensor(f"{prefix}ssm_conv1d.weight"))
        mixed = blocks.linear(rows, f"{prefix}attn_qkv")
        mixed = opset13.swish(short_convolution(self._inputs, mixed, weight, layer))
        widths = np.array([heads.keys, heads.keys, heads.values]) * heads.size
        parts = opset13.variadic_split(mixed, np.int64(1), widths).outputs()
        q, k = (self._direction(part) for part in parts[:2])
        v = self._by_head(parts[2], heads.values)
        steps = opset13.add(
            blocks.linear(rows, f"{prefix}ssm_alpha"), floats(blocks.tensor(f"{prefix}ssm_dt.bias"))
        )
        decay = opset13.multiply(opset13.softplus(steps), floats(blocks.tensor(f"{prefix}ssm_a")))
        beta = opset13.sigmoid(blocks.linear(rows, f"{prefix}ssm_beta"))
        attended = gated_delta_rule(self._inputs, self._rule, (q, k, v, decay, beta), layer)
        attended = blocks.norm(opset13.unsqueeze(attended, np.int64(0)), f"{prefix}ssm_norm")
        gate = self._by_head(blocks.linear(rows, f"{prefix}attn_gate"), heads.values)
        attended = opset13.multiply(attended, opset13.swish(gate))
        joined = opset13.reshape(attended, np.array([1, 1, -1, heads.values * heads.size]), False)
        return blocks.linear(joined.output(0), f"{prefix}ssm_out")

    def _direction(self, part: Any) -> Any:
        """Queries or keys of length 1, repeated for all heads of values."""
        from openvino import opset13

        rows = self._by_head(part, self._heads.keys)
        squares = opset13.reduce_sum(opset13.multiply(rows, rows), np.array([3]), True)
        length = opset13.sqrt(opset13.add(squares, _LEAST_SQUARE))
        times = self._heads.values // self._heads.keys
        return opset13.tile(opset13.divide(rows, length), np.array([1, 1, times, 1])).output(0)

    def _by_head(self, rows: Any, count: int) -> Any:
        """[1, rows, count, size]."""
        from openvino import opset13

        shape = np.array([1, -1, count, self._heads.size])
        return opset13.reshape(rows, shape, False).output(0)


def _delta_rule() -> Any:
    """A GatedDeltaNet whose inputs are still to be set."""
    size = len(VECTOR)
    fields = {
        **{"block_count": 2, "full_attention_interval": 2, "ssm.conv_kernel": 4},
        **{"ssm.state_size": size, "ssm.group_count": 1, "ssm.time_step_rank": 1},
        "ssm.inner_size": size,
    }
    tensors: dict[str, Any] = {}
    for prefix in ("blk.0.", "blk.1."):
        for part in ("attn_norm", "post_attention_norm"):
            tensors[prefix + part] = VECTOR
        for part in ("ffn_gate", "ffn_up", "ffn_down"):
            tensors[prefix + part] = SQUARE
    tensors |= {
        "blk.0.attn_qkv": np.concatenate([SQUARE] * 3),
        **{f"blk.0.{part}": SQUARE for part in ("attn_gate", "ssm_out")},
        **{f"blk.0.{part}": SQUARE[:1] for part in ("ssm_alpha", "ssm_beta")},
        "blk.0.ssm_conv1d": np.ones((3 * size, 4), np.float32),
        **{"blk.0.ssm_dt.bias": VECTOR[:1], "blk.0.ssm_a": VECTOR[:1], "blk.0.ssm_norm": VECTOR},
        "blk.1.attn_q": np.concatenate([SQUARE] * 2),
        **{f"blk.1.attn_{part}": SQUARE for part in ("k", "v", "output")},
        **{f"blk.1.attn_{part}_norm": VECTOR for part in ("q", "k")},
    }
    return frontend_operations("GatedDeltaNet", "qwen35", fields, tensors)[0]
