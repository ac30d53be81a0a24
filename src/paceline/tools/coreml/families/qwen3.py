"""Qwen3, dense: transformers' `qwen3`. Queries and keys are normed by head before they turn."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.tools.coreml.checkpoint import under
from paceline.tools.coreml.decoder import Decoder, Heads, SelfAttention, usual_layer
from paceline.tools.coreml.expect import (
    STATIC_ROPE,
    expect,
    expect_layer_types,
    expect_rope,
    expect_unused_window,
)
from paceline.tools.coreml.family import Family
from paceline.tools.coreml.layers import RMSNorm


def qwen3(config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int) -> Family:
    """See `Family`.

    Raises:
        ModelError: the config asks for what is not implemented.
    """
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    del ring  # only attention looks back
    expect(config, "hidden_act", "silu")
    expect_rope(config, *STATIC_ROPE)
    expect_layer_types(config, "full_attention", "sliding_attention")
    if "sliding_attention" in config.layer_types:
        expect_unused_window(config, slots)
    return Decoder(
        config,
        weights,
        slots=slots,
        layer=lambda _, own: _layer(config, own, slots),
        rotary=Qwen3RotaryEmbedding(config),
        norm="model.norm.weight",
        eps=config.rms_norm_eps,
    )


def _layer(config: Any, weights: Mapping[str, Tensor], slots: int) -> nn.Module:
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    eps = config.rms_norm_eps
    attention = under(weights, "self_attn.")
    return usual_layer(
        config,
        weights,
        SelfAttention(
            attention,
            heads,
            slots,
            bias=config.attention_bias,
            q_norm=RMSNorm(attention["q_norm.weight"], eps, axis=2),
            k_norm=RMSNorm(attention["k_norm.weight"], eps, axis=2),
        ),
    )
