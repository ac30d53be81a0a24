"""Llama (SmolLM2, Llama 3 and what is built like them): transformers' `llama`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.tools.coreml.checkpoint import under
from paceline.tools.coreml.decoder import Decoder, Heads, SelfAttention, usual_layer
from paceline.tools.coreml.expect import STATIC_ROPE, expect, expect_rope
from paceline.tools.coreml.family import Family


def llama(config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int) -> Family:
    """See `Family`.

    Raises:
        ModelError: the config asks for what is not implemented.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    del ring  # only attention looks back
    expect(config, "hidden_act", "silu")
    expect(config, "mlp_bias", False)
    expect_rope(config, *STATIC_ROPE)
    return Decoder(
        config,
        weights,
        slots=slots,
        layer=lambda _, own: _layer(config, own, slots),
        rotary=LlamaRotaryEmbedding(config),
        norm="model.norm.weight",
        eps=config.rms_norm_eps,
    )


def _layer(config: Any, weights: Mapping[str, Tensor], slots: int) -> nn.Module:
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    attention = under(weights, "self_attn.")
    return usual_layer(
        config,
        weights,
        SelfAttention(attention, heads, slots, bias=config.attention_bias),
    )
