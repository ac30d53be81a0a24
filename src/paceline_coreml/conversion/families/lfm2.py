"""LFM2 and LFM2.5: transformers' `lfm2` (dense) and `lfm2_moe` (experts after the first layers).

Some layers have Qwen3's attention; the others have a short causal convolution between two gates.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline_coreml.conversion.checkpoint import Prefixed
from paceline_coreml.conversion.config_checks import (
    STATIC_ROPE,
    check_layer_types,
    check_rope,
    unsupported,
)
from paceline_coreml.conversion.decoder import (
    AttentionSizes,
    Layer,
    SelfAttention,
    channels,
    linear,
)
from paceline_coreml.conversion.experts import Experts, Stack, top_k_mask
from paceline_coreml.conversion.family import Family, rotary_of
from paceline_coreml.conversion.layers import (
    ConvState,
    GatedFeedForward,
    LayerInputs,
    RMSNorm,
    projection,
)


def lfm2(config: Any, weights: Mapping[str, Tensor], *, slots: int, conv_slots: int) -> Family:
    """Open a dense model, or one with experts. Raises ModelError for an unsupported config."""
    dense = getattr(config, "num_dense_layers", config.num_hidden_layers)
    if dense < config.num_hidden_layers and (
        not 1 <= config.num_experts_per_tok <= config.num_experts
    ):
        expected = f"1 to num_experts, {config.num_experts}"
        raise unsupported(config, "num_experts_per_tok", config.num_experts_per_tok, expected)
    check_rope(config, *STATIC_ROPE)
    check_layer_types(config, "full_attention", "conv")
    convolutions = "conv" in config.layer_types
    if convolutions and config.conv_L_cache < 2:
        raise unsupported(config, "conv_L_cache", config.conv_L_cache, "at least 2")

    def layer(index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        mix: nn.Module
        if config.layer_types[index] == "conv":
            mix = ShortConvolution(Prefixed(tensors, "conv."), conv_slots, bias=config.conv_bias)
        else:
            mix = _attention(config, Prefixed(tensors, "self_attn."), slots)
        feed_forward = Prefixed(tensors, "feed_forward.")
        return Layer(
            RMSNorm(tensors["operator_norm.weight"], config.norm_eps),
            mix,
            RMSNorm(tensors["ffn_norm.weight"], config.norm_eps),
            _dense(feed_forward) if index < dense else Mixture(config, feed_forward),
        )

    return Family(
        config,
        weights,
        slots=slots,
        layer=layer,
        rotary=rotary_of(config),
        norm="model.embedding_norm.weight",
        eps=config.norm_eps,
        lags=config.conv_L_cache - 1 if convolutions else 0,
    )


def _attention(config: Any, weights: Mapping[str, Tensor], slots: int) -> nn.Module:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    # Not a field of these configs, but transformers uses it if present.
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return SelfAttention(
        weights,
        AttentionSizes(heads, kv_heads, size),
        slots,
        out="out_proj",
        q_norm=RMSNorm(weights["q_layernorm.weight"], config.norm_eps, axis=2),
        k_norm=RMSNorm(weights["k_layernorm.weight"], config.norm_eps, axis=2),
    )


def _dense(weights: Mapping[str, Tensor]) -> nn.Module:
    return GatedFeedForward(weights["w1.weight"], weights["w3.weight"], weights["w2.weight"])


class ShortConvolution(nn.Module):
    """A module for out(after * conv(before * x)), with a depthwise causal convolution over rows.

    The convolution is a sum of shifted products, because depthwise convolutions run on the CPU.
    """

    def __init__(self, weights: Mapping[str, Tensor], conv_slots: int, *, bias: bool) -> None:
        """Read the weights; `conv_slots` is the number of rows in the `ConvState`."""
        super().__init__()
        taps = weights["conv.weight"]  # [d, 1, taps]: the last one is for the current row
        self.taps = nn.Parameter(taps.permute(2, 0, 1).flip(0)[..., None], requires_grad=False)
        self.bias = channels(weights["conv.bias"]) if bias else None
        inward = weights["in_proj.weight"].chunk(3)
        biases = weights["in_proj.bias"].chunk(3) if bias else (None, None, None)
        self.before, self.after, self.x = map(projection, inward, biases)
        self.out = linear(weights, "out_proj", bias=bias)
        self.window, self._lags = ConvState(taps.shape[0], conv_slots), taps.shape[2] - 1

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        now = self.before(x) * self.x(x)
        mixed = now * self.taps[:1]
        for lag, row in enumerate(self.window(now, inputs, self._lags), start=1):
            mixed = mixed + row * self.taps[lag : lag + 1]
        if self.bias is not None:
            mixed = mixed + self.bias
        out: Tensor = self.out(self.after(x) * mixed)
        return out


class Mixture(nn.Module):
    """A mixture of experts with sigmoid scores.

    The expert bias, if any, affects which experts are picked, but not their weights.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.router = linear(weights, "gate")
        self.bias = channels(weights["expert_bias"]) if config.use_expert_bias else None
        gate, up, down = (_stack(weights, name, config.num_experts) for name in ("w1", "w3", "w2"))
        self.experts = Experts(gate, up, down)
        self._top_k = config.num_experts_per_tok
        self._sum_to_one, self._scale = config.norm_topk_prob, config.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        biased = scores if self.bias is None else scores + self.bias
        weights = scores * top_k_mask(biased, self._top_k)
        if self._sum_to_one:
            weights = weights / (weights.sum(1, keepdim=True) + _EPS)
        out: Tensor = self.experts(x, weights * self._scale)
        return out


_EPS = 1e-6
"""Added to the divisor of the scores, as in transformers."""


def _stack(weights: Mapping[str, Tensor], name: str, experts: int) -> Stack:
    return Stack(torch.stack([weights[f"experts.{i}.{name}.weight"] for i in range(experts)]))
