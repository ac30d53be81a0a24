"""Hunyuan, dense (Hy-MT): transformers' `hunyuan_v1_dense`.

Queries and keys are normed by head after they have turned: the norm has a weight for each channel,
so the order matters. What its configs call "dynamic" RoPE with an alpha has a larger base from the
first token on, and is as static as the default.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.tools.coreml.checkpoint import under
from paceline.tools.coreml.decoder import Decoder, Heads, SelfAttention, usual_layer
from paceline.tools.coreml.expect import STATIC_ROPE, expect, expect_rope, refusal
from paceline.tools.coreml.family import Family
from paceline.tools.coreml.layers import RMSNorm


def hunyuan(config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int) -> Family:
    """See `Family`.

    Raises:
        ModelError: the config asks for what is not implemented.
    """
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
        HunYuanDenseV1RotaryEmbedding,
    )

    del ring  # only attention looks back
    expect(config, "hidden_act", "silu")
    expect_rope(config, *STATIC_ROPE, "dynamic")
    alpha = config.rope_parameters.get("alpha")
    if config.rope_parameters["rope_type"] == "dynamic" and not alpha:
        raise refusal(config, "rope_type 'dynamic' with alpha", alpha, "a number")
    if config.head_dim is None:
        raise refusal(config, "head_dim", None, "a number")
    return Decoder(
        config,
        weights,
        slots=slots,
        layer=lambda _, own: _layer(config, own, slots),
        rotary=HunYuanDenseV1RotaryEmbedding(config),
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
            q_norm=RMSNorm(attention["query_layernorm.weight"], eps, axis=2),
            k_norm=RMSNorm(attention["key_layernorm.weight"], eps, axis=2),
            norm_turned=True,
        ),
    )
