"""Families whose layers are not all alike: LFM2, Qwen3.5 and Gemma 4, as they are in GGUF.

Most layers of LFM2 and LFM2-MoE have a gated short convolution in place of attention. Those of
Qwen3.5 (text) have linear attention, a gated delta rule after a short convolution: its heads of
values are stored by the head of keys that they share; GGUF has those of equal rank side by side, so
that readers repeat the keys as a whole.

In Gemma 4 (text), layers with full attention have larger heads, of which a part is rotated
("proportional"). The last layers attend to the keys and values of earlier ones. Small models look
up, for each token, a vector per layer beside the embedding.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from paceline.models.checkpoints.model import (
    MOST_EXPERTS,
    Config,
    Experts,
    Layer,
    MakeOutput,
    Value,
)
from paceline.models.checkpoints.tensors import Form, Order, Output, rearranged, whole

_CONV, _LINEAR, _FULL = "conv", "linear_attention", "full_attention"
"""Types of layers."""
_INTERVAL = 4
_SECTIONS = [11, 11, 10]


def lfm2_layers(config: Config, plain: list[Layer]) -> list[Layer]:
    """Sizes of each layer. GGUF marks those without attention by 0 heads of keys."""
    kinds = config.get("layer_types")
    if kinds is None:
        indices = config.get("full_attn_idxs", list(range(len(plain))))
        is_list = isinstance(indices, list) and all(index in range(len(plain)) for index in indices)
        if not is_list:
            raise config.wrong("full_attn_idxs", indices, "a list of layers")
        kinds = [_FULL if layer in indices else _CONV for layer in range(len(plain))]
    is_list = isinstance(kinds, list) and len(kinds) == len(plain)
    if not is_list or any(kind not in (_CONV, _FULL) for kind in kinds):
        raise config.wrong("layer_types", kinds, f"{len(plain)} times {_CONV} or {_FULL}")
    ff = _ff(config)
    return [
        layer._replace(ff=ff)
        if kind == _FULL
        else layer._replace(ff=ff, kv_heads=0, has_attention=False)
        for layer, kind in zip(plain, kinds, strict=True)
    ]


def lfm2_metadata(config: Config) -> dict[str, Value]:
    """Keys of lfm2 alone."""
    return {"shortconv.l_cache": _kernel(config)}


def lfm2_moe_metadata(config: Config) -> dict[str, Value]:
    """Keys of lfm2moe alone."""
    return {
        **lfm2_metadata(config),
        "leading_dense_block_count": _dense_layers(config),
        "expert_gating_func": 2,  # sigmoid
    }


def lfm2_experts(config: Config) -> Experts:
    """Sizes of the experts of LFM2-MoE."""
    has_bias = config.flag("use_expert_bias", default=True)
    return Experts(
        count=config.integer("num_experts", most=MOST_EXPERTS),
        used=config.integer("num_experts_per_tok"),
        ff=config.integer("moe_intermediate_size"),
        dense_layers=_dense_layers(config),
        router="feed_forward.gate",
        score_bias="feed_forward.expert_bias" if has_bias else None,
    )


def lfm2_recurrent(config: Config, prefix: str, name: Callable[[str], str]) -> Iterator[Output]:
    """Tensors of the layer `prefix`, which has a short convolution."""
    hidden, kernel = config.integer("hidden_size"), _kernel(config)
    for part, rows in (("in_proj", 3 * hidden), ("out_proj", hidden)):
        source = f"{prefix}conv.{part}.weight"
        yield whole(name(source), source, (rows, hidden), Form.MATRIX)
    source = f"{prefix}conv.conv.weight"
    shapes = (hidden, 1, kernel), (hidden, kernel)
    yield rearranged(name(source), source, shapes, lambda values: values[:, 0].copy())


def _dense_layers(config: Config) -> int:
    return config.integer("num_dense_layers", default=2, least=0)


def _kernel(config: Config) -> int:
    return config.integer("conv_L_cache", default=3, most=64)


def _ff(config: Config) -> int:
    """Width of the feed-forward network, as transformers' Lfm2MLP makes it of the configuration."""
    ff = config.integer("block_ff_dim", "intermediate_size")
    if config.model_type == "lfm2" and config.flag("block_auto_adjust_ff_dim", default=True):
        multiple = config.integer("block_multiple_of", default=256)
        ff = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * ff / 3))
        ff = multiple * -(-ff // multiple)
    return ff


GEMMA4_DEFAULTS = {
    **{"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512},
    **{"vocab_size": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {},
    },
}
"""Of transformers' Gemma4TextConfig."""


class _Sizes(NamedTuple):
    """Of linear attention."""

    keys: int
    """Heads."""
    values: int
    key_size: int
    value_size: int
    kernel: int


def qwen35_layers(config: Config, plain: list[Layer]) -> list[Layer]:
    """Sizes of each layer; every fourth has full attention, unless the configuration differs."""
    interval = _interval(config)
    implied = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(len(plain))]
    if config.get("layer_types", implied) != implied:
        expected = f"every {interval}th layer {_FULL}, the others {_LINEAR}"
        raise config.wrong("layer_types", config.get("layer_types"), expected)
    return [
        layer._replace(has_attention=kind == _FULL)
        for layer, kind in zip(plain, implied, strict=True)
    ]


def qwen35_metadata(config: Config) -> dict[str, Value]:
    """Keys of qwen35 alone."""
    sizes = _sizes(config)
    rope = config.get("rope_parameters", config.get("rope_scaling", {}))
    sections = rope.get("mrope_section", _SECTIONS) if isinstance(rope, dict) else _SECTIONS
    if not isinstance(sections, list) or not all(isinstance(section, int) for section in sections):
        raise config.wrong("mrope_section", sections, "a list of integers")
    return {
        "full_attention_interval": _interval(config),
        "rope.dimension_sections": [*sections, 0, 0, 0, 0][:4],
        "ssm.conv_kernel": sizes.kernel,
        "ssm.state_size": sizes.key_size,
        "ssm.group_count": sizes.keys,
        "ssm.time_step_rank": sizes.values,
        "ssm.inner_size": sizes.values * sizes.value_size,
    }


def qwen35_moe_metadata(config: Config) -> dict[str, Value]:
    """Keys of qwen35moe alone."""
    return {
        **qwen35_metadata(config),
        "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
    }


def qwen35_experts(config: Config) -> Experts:
    """Sizes of the experts."""
    return Experts(
        count=config.integer("num_experts", most=MOST_EXPERTS),
        used=config.integer("num_experts_per_tok"),
        ff=config.integer("moe_intermediate_size"),
        shared_ff=config.integer("shared_expert_intermediate_size"),
        shared="mlp.shared_expert.",
        shared_gate="mlp.shared_expert_gate",
    )


def qwen35_recurrent(config: Config, prefix: str, name: Callable[[str], str]) -> Iterator[Output]:
    """Tensors of the layer `prefix`, which has linear attention."""
    hidden, sizes = config.integer("hidden_size"), _sizes(config)
    prefix += "linear_attn."
    heads = _side_by_side(sizes, 1)
    values = _side_by_side(sizes, sizes.value_size)
    keys = np.arange(2 * sizes.keys * sizes.key_size, dtype=np.int64)
    mixed = np.concatenate([keys, len(keys) + values])
    for part, order, form in (
        ("in_proj_qkv", mixed, Form.MATRIX),
        ("in_proj_z", values, Form.MATRIX),
        # Small, and the recurrent state is sensitive to their rounding.
        ("in_proj_a", heads, Form.TABLE),
        ("in_proj_b", heads, Form.TABLE),
    ):
        source = f"{prefix}{part}.weight"
        yield whole(name(source), source, (len(order), hidden), form, order=order)
    source, shape = f"{prefix}out_proj.weight", (hidden, len(values))
    yield rearranged(name(source), source, (shape, shape), lambda rows: rows[:, values].copy())
    source = f"{prefix}conv1d.weight"
    shapes = (len(mixed), 1, sizes.kernel), (len(mixed), sizes.kernel)
    yield rearranged(name(source), source, shapes, lambda weights: weights[mixed, 0])
    single = (len(heads),)
    target = name(f"{prefix}dt_proj.bias")
    yield whole(target, f"{prefix}dt_bias", single, Form.PLAIN, order=heads)
    source = f"{prefix}A_log"
    target = name(source).removesuffix(".weight")
    yield rearranged(target, source, (single, single), lambda logs: -np.exp(logs[heads]))
    source = f"{prefix}norm.weight"
    yield whole(name(source), source, (sizes.value_size,), Form.PLAIN)


def _side_by_side(sizes: _Sizes, width: int) -> Order:
    """Order of rows of the heads of values, `width` rows each."""
    rows = np.arange(sizes.values * width, dtype=np.int64)
    return rows.reshape(sizes.keys, -1, width).swapaxes(0, 1).reshape(-1)


def _interval(config: Config) -> int:
    """Distance between layers with full attention, from the configuration or the first of them."""
    kinds = config.get("layer_types")
    first = kinds.index(_FULL) + 1 if isinstance(kinds, list) and _FULL in kinds else _INTERVAL
    return config.integer("full_attention_interval", default=first)


def _sizes(config: Config) -> _Sizes:
    sizes = _Sizes(
        config.integer("linear_num_key_heads", default=16),
        config.integer("linear_num_value_heads", default=32),
        config.integer("linear_key_head_dim", default=128),
        config.integer("linear_value_head_dim", default=128),
        config.integer("linear_conv_kernel_dim", default=4, most=64),
    )
    if sizes.values % sizes.keys:
        name = "linear_num_value_heads"
        raise config.wrong(name, sizes.values, f"a multiple of {sizes.keys} heads of keys")
    if sizes.value_size != sizes.key_size:
        name = "linear_value_head_dim"
        raise config.wrong(name, sizes.value_size, f"linear_key_head_dim, {sizes.key_size}")
    return sizes


def gemma4_layers(config: Config, plain: list[Layer]) -> list[Layer]:
    """Sizes of each layer."""
    head_dim = _global_head_dim(config)
    k_is_v = config.flag("attention_k_eq_v", default=False)
    kv_heads = _of_full_attention(
        config, "num_key_value_heads", "num_global_key_value_heads", plain[0].kv_heads
    )
    first_shared = len(plain) - _shared(config)
    wide = 2 if config.flag("use_double_wide_mlp", default=False) else 1
    last = {layer.has_window: index for index, layer in enumerate(plain[:first_shared])}
    sizes = []
    for index, layer in enumerate(plain):
        size = layer
        if index >= first_shared:
            if layer.has_window not in last:
                raise config.wrong("num_kv_shared_layers", _shared(config), "fewer layers")
            size = size._replace(kv_of=last[layer.has_window], ff=layer.ff * wide)
        if not layer.has_window:
            size = size._replace(head_dim=head_dim, v_is_k=k_is_v)
            if k_is_v:
                size = size._replace(kv_heads=kv_heads)
        sizes.append(size)
    return sizes


def gemma4_metadata(config: Config) -> dict[str, Value]:
    """Keys of gemma4 alone."""
    full, sliding = _global_head_dim(config), config.integer("head_dim")
    cap = "final_logit_softcapping"
    return {
        **({cap: config.number(cap)} if config.get(cap) is not None else {}),
        "attention.shared_kv_layers": _shared(config),
        "embedding_length_per_layer_input": _per_layer(config),
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": sliding,
    }


def gemma4_extra(config: Config, make: MakeOutput) -> Iterator[Output]:
    """A scale for each layer, and the inputs per layer."""
    count, hidden = config.integer("num_hidden_layers"), config.integer("hidden_size")
    size = _per_layer(config)
    if size:
        vocab = config.integer("vocab_size_per_layer_input", default=config.integer("vocab_size"))
        yield make("model.embed_tokens_per_layer.weight", (vocab, count * size), Form.TABLE)
        name = "model.per_layer_model_projection.weight"
        yield make(name, (count * size, hidden), Form.MATRIX)
        yield make("model.per_layer_projection_norm.weight", (size,), Form.PLAIN)
    for layer in range(count):
        prefix = f"model.layers.{layer}."
        yield make(f"{prefix}layer_scalar", (1,), Form.PLAIN)
        if size:
            yield make(f"{prefix}per_layer_input_gate.weight", (size, hidden), Form.MATRIX)
            yield make(f"{prefix}per_layer_projection.weight", (hidden, size), Form.MATRIX)
            yield make(f"{prefix}post_per_layer_input_norm.weight", (hidden,), Form.PLAIN)


def _global_head_dim(config: Config) -> int:
    return _of_full_attention(config, "head_dim", "global_head_dim", 512)


def _of_full_attention(config: Config, key: str, name: str, default: int) -> int:
    """A size of layers with full attention: by its `name`, or as transformers writes it back."""
    per_layer = config.get("per_layer_config")
    if isinstance(per_layer, dict):
        sizes = {str(layer.get(key)) for layer in per_layer.values() if isinstance(layer, dict)}
        if len(sizes) == 1 and (size := sizes.pop()).isdecimal():
            return int(size)
    return config.integer(name, default=default)


def _shared(config: Config) -> int:
    """Layers at the end without keys and values of their own."""
    return config.integer("num_kv_shared_layers", default=0, least=0)


def _per_layer(config: Config) -> int:
    """Size of the input per layer; 0: there is none."""
    return config.integer("hidden_size_per_layer_input", default=0, least=0)
