"""LFM2 and LFM2.5: transformers' `lfm2` (dense) and `lfm2_moe` (experts after the first layers).

Some layers attend, as Qwen3 does; the others mix a row with the few before it, in a short
convolution between two gates.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.tools.coreml.checkpoint import under
from paceline.tools.coreml.decoder import Decoder, Heads, Layer, SelfAttention, linear
from paceline.tools.coreml.expect import STATIC_ROPE, expect_layer_types, expect_rope, refusal
from paceline.tools.coreml.experts import Experts, Stack, top_k_mask
from paceline.tools.coreml.family import Family
from paceline.tools.coreml.layers import GatedFeedForward, RMSNorm, Step, Window, projection


def lfm2(config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int) -> Family:
    """See `Family`. Dense: the checkpoint's feed-forwards have the size they were adjusted to.

    Raises:
        ModelError: the config asks for what is not implemented.
    """
    from transformers.models.lfm2.modeling_lfm2 import Lfm2RotaryEmbedding

    return _decoder(
        config, weights, slots, ring, Lfm2RotaryEmbedding, dense=config.num_hidden_layers
    )


def lfm2_moe(config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int) -> Family:
    """See `Family`. A mixture of experts.

    Raises:
        ModelError: the config asks for what is not implemented.
    """
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeRotaryEmbedding

    if not 1 <= config.num_experts_per_tok <= config.num_experts:
        expected = f"1 to the {config.num_experts} experts there are"
        raise refusal(config, "num_experts_per_tok", config.num_experts_per_tok, expected)
    return _decoder(
        config, weights, slots, ring, Lfm2MoeRotaryEmbedding, dense=config.num_dense_layers
    )


def _decoder(
    config: Any, weights: Mapping[str, Tensor], slots: int, ring: int, rotary: Any, *, dense: int
) -> Family:
    expect_rope(config, *STATIC_ROPE)
    expect_layer_types(config, "full_attention", "conv")
    convolutions = "conv" in config.layer_types
    if convolutions and config.conv_L_cache < 2:
        raise refusal(config, "conv_L_cache", config.conv_L_cache, "at least 2")

    def layer(index: int, own: Mapping[str, Tensor]) -> nn.Module:
        mix: nn.Module
        if config.layer_types[index] == "conv":
            mix = ShortConvolution(under(own, "conv."), ring, bias=config.conv_bias)
        else:
            mix = _attention(config, under(own, "self_attn."), slots)
        feed_forward = under(own, "feed_forward.")
        return Layer(
            RMSNorm(own["operator_norm.weight"], config.norm_eps),
            mix,
            RMSNorm(own["ffn_norm.weight"], config.norm_eps),
            _dense(feed_forward) if index < dense else Mixture(config, feed_forward),
        )

    return Decoder(
        config,
        weights,
        slots=slots,
        layer=layer,
        rotary=rotary(config),
        norm="model.embedding_norm.weight",
        eps=config.norm_eps,
        lags=config.conv_L_cache - 1 if convolutions else 0,
    )


def _attention(config: Any, weights: Mapping[str, Tensor], slots: int) -> nn.Module:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    # Not a field of these configs, but heeded by transformers if one has it.
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return SelfAttention(
        weights,
        Heads(heads, kv_heads, size),
        slots,
        out="out_proj",
        q_norm=RMSNorm(weights["q_layernorm.weight"], config.norm_eps, axis=2),
        k_norm=RMSNorm(weights["k_layernorm.weight"], config.norm_eps, axis=2),
    )


def _dense(weights: Mapping[str, Tensor]) -> nn.Module:
    return GatedFeedForward(weights["w1.weight"], weights["w3.weight"], weights["w2.weight"])


class ShortConvolution(nn.Module):
    """out(after * (taps over time of before * x)): a channel at a time, over the last few rows.

    As a sum of shifted products: the Neural Engine does not take a convolution by channels.
    """

    def __init__(self, weights: Mapping[str, Tensor], ring: int, *, bias: bool) -> None:
        """`ring` places for what the next rows look back to."""
        super().__init__()
        taps = weights["conv.weight"]  # [d, 1, rows]: the last one is for the row itself
        self.taps = nn.Parameter(taps.permute(2, 0, 1).flip(0)[..., None], requires_grad=False)
        self.bias = _added(weights["conv.bias"]) if bias else None
        inward = weights["in_proj.weight"].chunk(3)
        biases = weights["in_proj.bias"].chunk(3) if bias else (None, None, None)
        self.before, self.after, self.x = map(projection, inward, biases)
        self.out = linear(weights, "out_proj", bias=bias)
        self.window, self._lags = Window(taps.shape[0], ring), taps.shape[2] - 1

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[1, d, T, 1] -> [1, d, T, 1]."""
        now = self.before(x) * self.x(x)
        mixed = now * self.taps[:1]
        for lag, row in enumerate(self.window(now, step, self._lags), start=1):
            mixed = mixed + row * self.taps[lag : lag + 1]
        if self.bias is not None:
            mixed = mixed + self.bias
        out: Tensor = self.out(self.after(x) * mixed)
        return out


class Mixture(nn.Module):
    """A few of many experts, chosen by a sigmoid of each one's own.

    A bias on the scores, where there is one, has a say in who is chosen, not in how much it counts.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.router = linear(weights, "gate")
        self.bias = _added(weights["expert_bias"]) if config.use_expert_bias else None
        gate, up, down = (_stack(weights, name, config.num_experts) for name in ("w1", "w3", "w2"))
        self.experts = Experts(gate, up, down)
        self._chosen = config.num_experts_per_tok
        self._sum_to_one, self._scale = config.norm_topk_prob, config.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """[1, d, T, 1] -> [1, d, T, 1]."""
        scores = self.router(x).sigmoid()
        biased = scores if self.bias is None else scores + self.bias
        weights = scores * top_k_mask(biased, self._chosen)
        if self._sum_to_one:
            weights = weights / (weights.sum(1, keepdim=True) + _LEAST_SUM)
        out: Tensor = self.experts(x, weights * self._scale)
        return out


_LEAST_SUM = 1e-6
"""As in transformers: added to what the scores are divided by."""


def _stack(weights: Mapping[str, Tensor], name: str, experts: int) -> Stack:
    return Stack(torch.stack([weights[f"experts.{i}.{name}.weight"] for i in range(experts)]))


def _added(bias: Tensor) -> nn.Parameter:
    return nn.Parameter(bias.view(1, -1, 1, 1), requires_grad=False)
