"""Phi-3 and Phi-4-mini: transformers' `phi3`.

Queries, keys and values come in one matrix, and so do gate and up. Only a part of each head turns.

LongRoPE has two sets of frequencies, for texts of up to `original_max_position_embeddings` tokens
and for longer ones. transformers goes from one to the other in the middle of a text and computes
all keys anew. Keys in slots are never computed anew, so the longest text has to fit the first set.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.tools.coreml.checkpoint import under
from paceline.tools.coreml.decoder import Decoder, Heads, Layer, SelfAttention
from paceline.tools.coreml.expect import (
    STATIC_ROPE,
    expect,
    expect_rope,
    expect_unused_window,
    refusal,
)
from paceline.tools.coreml.family import Family
from paceline.tools.coreml.layers import GatedFeedForward, RMSNorm


def phi3(config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int) -> Family:
    """See `Family`.

    Raises:
        ModelError: the config asks for what is not implemented, or for other frequencies in a text
            of more tokens than `slots`.
    """
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    del ring  # only attention looks back
    expect(config, "hidden_act", "silu")
    expect_rope(config, *STATIC_ROPE, "longrope", partial=True)
    expect_unused_window(config, slots)
    _expect_short(config, slots)
    rotary = Phi3RotaryEmbedding(config)
    turned = 2 * len(rotary.inv_freq)
    return Decoder(
        config,
        weights,
        slots=slots,
        layer=lambda _, own: _layer(config, own, slots, turned),
        rotary=rotary,
        norm="model.norm.weight",
        eps=config.rms_norm_eps,
    )


def _expect_short(config: Any, slots: int) -> None:
    rope = config.rope_parameters
    if rope["rope_type"] != "longrope":
        return
    longest = rope["original_max_position_embeddings"]
    if slots > longest:
        expected = (
            f"at least the {slots} slots of a text: beyond it, frequencies are others even for the "
            f"tokens before it. Choose at most {longest} slots"
        )
        raise refusal(config, "original_max_position_embeddings", longest, expected)


def _layer(config: Any, weights: Mapping[str, Tensor], slots: int, turned: int) -> nn.Module:
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    # Not a field of these configs, but heeded by transformers if one has it.
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    attention = under(weights, "self_attn.")
    q, k, v = attention["qkv_proj.weight"].split([queries * size, keys * size, keys * size])
    gate, up = weights["mlp.gate_up_proj.weight"].chunk(2)
    return Layer(
        RMSNorm(weights["input_layernorm.weight"], config.rms_norm_eps),
        SelfAttention(
            {
                "q_proj.weight": q,
                "k_proj.weight": k,
                "v_proj.weight": v,
                "o_proj.weight": attention["o_proj.weight"],
            },
            Heads(queries, keys, size),
            slots,
            turned=turned,
        ),
        RMSNorm(weights["post_attention_layernorm.weight"], config.rms_norm_eps),
        GatedFeedForward(gate, up, weights["mlp.down_proj.weight"]),
    )
