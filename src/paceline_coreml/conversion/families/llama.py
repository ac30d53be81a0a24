"""Llama, Qwen3, Hunyuan (dense) and Phi-3: one decoder with parametrized attention.

They differ in head norms (none, before RoPE, after RoPE), in biases, in the part of a head that
RoPE rotates, and in the checks of their configs.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from paceline_coreml.conversion.checkpoint import Prefixed
from paceline_coreml.conversion.config_checks import (
    STATIC_ROPE,
    check_field,
    check_layer_types,
    check_rope,
    check_window_unused,
    unsupported,
)
from paceline_coreml.conversion.decoder import (
    AttentionSizes,
    Layer,
    SelfAttention,
    llama_layer,
)
from paceline_coreml.conversion.family import Family, rotary_of
from paceline_coreml.conversion.layers import RMSNorm


def llama(config: Any, weights: Mapping[str, Tensor], *, slots: int, **_: Any) -> Family:
    """Open Llama, SmolLM2 and similar models. Raises ModelError for an unsupported config."""
    check_field(config, "mlp_bias", False)
    check_rope(config, *STATIC_ROPE)
    return decoder(config, weights, slots, rotary_of(config), bias=config.attention_bias)


def qwen3(config: Any, weights: Mapping[str, Tensor], *, slots: int, **_: Any) -> Family:
    """Open a dense Qwen3. Raises ModelError for an unsupported config."""
    check_rope(config, *STATIC_ROPE)
    check_layer_types(config, "full_attention", "sliding_attention")
    if "sliding_attention" in config.layer_types:
        check_window_unused(config, slots)
    return decoder(
        config,
        weights,
        slots,
        rotary_of(config),
        bias=config.attention_bias,
        norms=HeadNorms("q_norm", "k_norm"),
    )


def hunyuan(config: Any, weights: Mapping[str, Tensor], *, slots: int, **_: Any) -> Family:
    """Open a dense Hunyuan (Hy-MT). Raises ModelError for an unsupported config.

    "dynamic" RoPE with an alpha is static: its base is larger for all tokens.
    """
    check_rope(config, *STATIC_ROPE, "dynamic")
    alpha = config.rope_parameters.get("alpha")
    if config.rope_parameters["rope_type"] == "dynamic" and not alpha:
        raise unsupported(config, "rope_type 'dynamic' with alpha", alpha, "a number")
    if config.head_dim is None:
        raise unsupported(config, "head_dim", None, "a number")
    return decoder(
        config,
        weights,
        slots,
        rotary_of(config),
        bias=config.attention_bias,
        norms=HeadNorms("query_layernorm", "key_layernorm", after_rope=True),
    )


def phi3(config: Any, weights: Mapping[str, Tensor], *, slots: int, **_: Any) -> Family:
    """Open Phi-3 or Phi-4-mini. Raises ModelError for an unsupported config.

    LongRoPE has two sets of frequencies: for texts of up to `original_max_position_embeddings`
    tokens and for longer ones. transformers switches in the middle of a text and recomputes all
    keys. Here cached keys are never recomputed, so the context must not exceed the first set.
    """
    check_rope(config, *STATIC_ROPE, "longrope", partial=True)
    check_window_unused(config, slots)
    rope = config.rope_parameters
    max_slots = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "longrope" and slots > max_slots:
        expected = (
            f"at least the {slots} slots of the context, because the frequencies of all tokens "
            f"change in longer texts; choose at most {max_slots} slots"
        )
        raise unsupported(config, "original_max_position_embeddings", max_slots, expected)
    return decoder(config, weights, slots, rotary_of(config), split=_split_phi3)


class HeadNorms(NamedTuple):
    """The names of per-head RMS norms; weights are per channel, so their place matters to RoPE."""

    q: str
    k: str
    after_rope: bool = False


_Split = Callable[[Mapping[str, Tensor], AttentionSizes], Mapping[str, Tensor]]


def decoder(
    config: Any,
    weights: Mapping[str, Tensor],
    slots: int,
    rotary: Any,
    *,
    bias: bool = False,
    norms: HeadNorms | None = None,
    split: _Split | None = None,
    wrap: Callable[[int, Layer], nn.Module] = lambda _, layer: layer,
) -> Family:
    """Build a decoder. `split` renames a layer's tensors to Llama's; `wrap` replaces each layer."""
    check_field(config, "hidden_act", "silu")
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    # Not a field of Phi-3's configs, but transformers uses it if present.
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    heads, eps = AttentionSizes(queries, keys, size), config.rms_norm_eps

    def layer(index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        if split is not None:
            tensors = split(tensors, heads)
        attention_tensors = Prefixed(tensors, "self_attn.")
        q_norm, k_norm = (
            RMSNorm(attention_tensors[f"{name}.weight"], eps, axis=2) if name else None
            for name in (norms[:2] if norms else (None, None))
        )
        attention = SelfAttention(
            attention_tensors,
            heads,
            slots,
            bias=bias,
            rotary_dim=2 * len(rotary.inv_freq),
            q_norm=q_norm,
            k_norm=k_norm,
            norm_after_rope=norms is not None and norms.after_rope,
        )
        return wrap(index, llama_layer(tensors, attention, eps))

    return Family(config, weights, slots=slots, layer=layer, rotary=rotary, eps=eps)


def _split_phi3(tensors: Mapping[str, Tensor], heads: AttentionSizes) -> Mapping[str, Tensor]:
    """Split Phi-3's two fused matrices: queries, keys and values; and gate and up."""
    q, k = heads.queries * heads.size, heads.keys * heads.size
    qkv = tensors["self_attn.qkv_proj.weight"].split([q, k, k])
    gate_up = tensors["mlp.gate_up_proj.weight"].chunk(2)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
    parts = zip((*names, "mlp.up_proj"), (*qkv, *gate_up), strict=True)
    return {**tensors, **{f"{name}.weight": part for name, part in parts}}
