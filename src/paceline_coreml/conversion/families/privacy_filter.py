"""OpenAI's Privacy Filter: labels each token of a text with a kind of private data, or none.

It is transformers' token classifier `openai_privacy_filter`. The mask lets each row attend to rows
of its own text within the window. Invariant: layers have no states.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline_coreml.conversion.checkpoint import Prefixed
from paceline_coreml.conversion.config_checks import STATIC_ROPE, check_field, check_rope
from paceline_coreml.conversion.decoder import channels, linear
from paceline_coreml.conversion.experts import Experts, Stack, top_k_mask
from paceline_coreml.conversion.family import Family, rotary_of
from paceline_coreml.conversion.layers import LayerInputs, RMSNorm, apply_rope, query_order
from paceline_coreml.engine.inputs import HIDDEN


class PrivacyFilter(Family):
    """A `Family`; `slots` is the maximum text length."""

    def __init__(self, config: Any, weights: Mapping[str, Tensor], *, slots: int, **_: Any) -> None:
        check_field(config, "attention_bias", True)
        check_rope(config, *STATIC_ROPE)
        super().__init__(
            config,
            weights,
            slots=slots,
            layer=lambda _, tensors: PrivacyFilterLayer(config, tensors),
            rotary=rotary_of(config),
            eps=config.rms_norm_eps,
        )
        self.shape = replace(
            self.shape,
            task="token-classification",
            window=config.sliding_window,
            labels=tuple(config.id2label[index] for index in range(config.num_labels)),
        )

    def final(self) -> nn.Module:
        return nn.Sequential(super().final(), linear(self._weights, "score", bias=True))

    def head(self) -> None:
        """Return None: `final` computes the labels."""


class PrivacyFilterLayer(nn.Module):
    """A layer with attention, then a mixture of experts, both added to the residual."""

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.before = RMSNorm(weights["input_layernorm.weight"], eps)
        self.attention = SinkAttention(config, Prefixed(weights, "self_attn."))
        self.between = RMSNorm(weights["post_attention_layernorm.weight"], eps)
        self.router = linear(weights, "mlp.router", bias=True)
        self.experts = _experts(config, Prefixed(weights, "mlp.experts."))
        self._top_k = config.num_experts_per_tok

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        x = x + self.attention(self.before(x), inputs)
        normed = self.between(x)
        out: Tensor = x + self.experts(normed, self._weights(self.router(normed)))
        return out

    def _weights(self, scores: Tensor) -> Tensor:
        """Apply softmax to the top k of scores [1, experts, T, 1], with 0 for the others.

        transformers divides these by k, then multiplies the experts' sum by k.
        """
        hidden = (1 - top_k_mask(scores, self._top_k)) * HIDDEN
        return (scores + hidden).softmax(1)


_MIN = -65504.0
"""The lowest float16; without a lower bound the converter writes -inf."""


def _experts(config: Any, weights: Mapping[str, Tensor]) -> Experts:
    """Read matrices [experts, in, out] and biases [experts, out]; gate and up are stored as one."""
    alpha, limit = config.swiglu_alpha, config.swiglu_limit

    def between(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(_MIN, limit)
        return (up.clamp(min=-limit, max=limit) + 1) * gate * (gate * alpha).sigmoid()

    gate, up = weights["gate_up_proj"].transpose(1, 2).chunk(2, dim=1)
    gate_bias, up_bias = weights["gate_up_proj_bias"].chunk(2, dim=1)
    down = Stack(weights["down_proj"].transpose(1, 2), weights["down_proj_bias"])
    return Experts(Stack(gate, gate_bias), Stack(up, up_bias), down, between)


class SinkAttention(nn.Module):
    """An attention among the rows of a pass, with a mask and one attention sink per head.

    The sink is another score in the softmax, with a value of 0. Query heads are in `query_order`.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = config.head_dim
        order = query_order(heads, kv_heads, size)
        # This model's RoPE rotates adjacent channels as pairs. Reordering queries and keys in the
        # same way gives `apply_rope` its pairs, and does not change their products.
        q_order = _pairs_apart(order, size)
        k_order = _pairs_apart(torch.arange(kv_heads * size), size)
        self.q = linear(weights, "q_proj", bias=True, rows=q_order)
        self.k = linear(weights, "k_proj", bias=True, rows=k_order)
        self.v = linear(weights, "v_proj", bias=True)
        self.o = linear(weights, "o_proj", bias=True, columns=order)
        self.sinks = channels(weights["sinks"][order[::size] // size])
        self._heads, self._kv_heads, self._size = heads, kv_heads, size
        self._scale = size**-0.25

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        size, groups = self._size, self._heads // self._kv_heads
        # Both get the square root of the usual scale, so that neither is large in float16.
        q = apply_rope(self.q(x).reshape(1, self._heads, size, -1), inputs, size) * self._scale
        k = apply_rope(self.k(x).reshape(1, self._kv_heads, size, -1), inputs, size) * self._scale
        v = self.v(x).reshape(1, self._kv_heads, size, -1)
        if groups > 1:
            k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
        weights = self._softmax(q.transpose(2, 3) @ k + inputs.mask)
        # [head, dim, token] before heads become channels, as in `layers.Attention`.
        mixed = v @ weights.transpose(2, 3)
        out: Tensor = self.o(mixed.reshape(1, self._heads * size, -1, 1))
        return out

    def _softmax(self, scores: Tensor) -> Tensor:
        """Apply softmax to [1, heads, T, T] over the last axis and the sink, then drop the sink."""
        largest = torch.maximum(scores.amax(-1, keepdim=True), self.sinks)
        weights = (scores - largest).exp()
        return weights / (weights.sum(-1, keepdim=True) + (self.sinks - largest).exp())


def _pairs_apart(order: Tensor, size: int) -> Tensor:
    """Reorder the channels of heads, [heads * size]: each head's even ones, then its odd ones."""
    return order.view(-1, size // 2, 2).transpose(1, 2).reshape(-1)
