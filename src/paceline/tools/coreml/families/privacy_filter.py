"""OpenAI's Privacy Filter: says of each token of a text whether, and which, private data it is of.

Knows transformers' `openai_privacy_filter` as a token classifier. Knows no texts: which rows are
of one text, and near enough to see each other, is in the mask. The rule: nothing is remembered
between calls, so a layer has no states.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.tools.coreml.checkpoint import under
from paceline.tools.coreml.decoder import linear
from paceline.tools.coreml.expect import STATIC_ROPE, expect, expect_rope
from paceline.tools.coreml.experts import Experts, Stack, top_k_mask
from paceline.tools.coreml.family import Shape, Tables
from paceline.tools.coreml.layers import HIDDEN_BY_MASK, RMSNorm, Step, grouped, turn
from paceline.tools.coreml.rotary import rotary_tables


class PrivacyFilter:
    """See `Family`; there are neither slots nor a ring, `slots` is the longest text."""

    def __init__(
        self, config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int
    ) -> None:
        """Take a checkpoint.

        Raises:
            ModelError: the config asks for what is not implemented here.
        """
        expect(config, "attention_bias", True)
        expect_rope(config, *STATIC_ROPE)
        self._config, self._weights, self._slots = config, weights, slots
        self.shape = Shape(
            family="openai_privacy_filter",
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            stream_size=config.hidden_size,
            kind="token-classification",
            reach=config.sliding_window,
            labels=tuple(config.id2label[index] for index in range(config.num_labels)),
        )

    def layer(self, index: int) -> nn.Module:
        """See `Family`."""
        return Layer(self._config, under(self._weights, f"model.layers.{index}."))

    def embeddings(self) -> Tensor:
        """See `Family`."""
        return self._weights["model.embed_tokens.weight"]

    def final(self) -> nn.Module:
        """See `Family`."""
        return nn.Sequential(
            RMSNorm(self._weights["model.norm.weight"], self._config.rms_norm_eps),
            linear(self._weights, "score", bias=True),
        )

    def head(self) -> None:
        """None: the labels are in `final`."""

    def tables(self) -> Tables:
        """See `Family`."""
        from transformers.models.openai_privacy_filter import modeling_openai_privacy_filter as m

        return rotary_tables(m.OpenAIPrivacyFilterRotaryEmbedding(self._config), self._slots)


class Layer(nn.Module):
    """Attention, then the best few of many experts, each added to what came in."""

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.before = RMSNorm(weights["input_layernorm.weight"], eps)
        self.attention = SinkAttention(config, under(weights, "self_attn."))
        self.between = RMSNorm(weights["post_attention_layernorm.weight"], eps)
        self.router = linear(weights, "mlp.router", bias=True)
        self.experts = _experts(config, under(weights, "mlp.experts."))
        self._picks = config.num_experts_per_tok

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[1, d, T, 1] -> [1, d, T, 1]."""
        x = x + self.attention(self.before(x), step)
        normed = self.between(x)
        out: Tensor = x + self.experts(normed, self._shares(self.router(normed)))
        return out

    def _shares(self, scores: Tensor) -> Tensor:
        """[1, experts, T, 1] to the same: softmax over the best, 0 for the others.

        transformers divides these by their number, and multiplies the experts' sum with it again.
        """
        hidden = (1 - top_k_mask(scores, self._picks)) * HIDDEN_BY_MASK
        return (scores + hidden).softmax(1)


_LEAST = -65504.0
"""float16's: without a lower bound, a clamp's would be -inf."""


def _experts(config: Any, weights: Mapping[str, Tensor]) -> Experts:
    """Of a matrix [experts, in, out] and a bias [experts, out]; gate and up are one."""
    alpha, limit = config.swiglu_alpha, config.swiglu_limit

    def between(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(_LEAST, limit)
        return (up.clamp(min=-limit, max=limit) + 1) * gate * (gate * alpha).sigmoid()

    gate, up = weights["gate_up_proj"].transpose(1, 2).chunk(2, dim=1)
    gate_bias, up_bias = weights["gate_up_proj_bias"].chunk(2, dim=1)
    down = Stack(weights["down_proj"].transpose(1, 2), weights["down_proj_bias"])
    return Experts(Stack(gate, gate_bias), Stack(up, up_bias), down, between)


class SinkAttention(nn.Module):
    """Attention of all rows of a call to each other, as the mask has it.

    Each head has a sink: one more score beside those of the rows, which takes its share of the
    softmax and gives nothing for it. Query heads are in the order of `grouped`.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = config.head_dim
        order = grouped(heads, kv_heads, size)
        # Neighbours turn as a pair. With all first ones before all second ones, in queries and in
        # keys, they are what `turn` turns, and no product of the two changes.
        q_order = _pairs_apart(order, size)
        k_order = _pairs_apart(torch.arange(kv_heads * size), size)
        self.q = linear(weights, "q_proj", bias=True, rows=q_order)
        self.k = linear(weights, "k_proj", bias=True, rows=k_order)
        self.v = linear(weights, "v_proj", bias=True)
        self.o = linear(weights, "o_proj", bias=True, columns=order)
        sinks = weights["sinks"][order[::size] // size].view(1, -1, 1, 1)
        self.sinks = nn.Parameter(sinks, requires_grad=False)
        self._heads, self._kv_heads, self._size = heads, kv_heads, size
        self._scale = size**-0.25

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[1, d, T, 1] -> [1, d, T, 1]."""
        size, groups = self._size, self._heads // self._kv_heads
        # Both are scaled by the root of the usual scale, so that neither is large in float16.
        q = turn(self.q(x).reshape(1, self._heads, size, -1), step, size) * self._scale
        k = turn(self.k(x).reshape(1, self._kv_heads, size, -1), step, size) * self._scale
        v = self.v(x).reshape(1, self._kv_heads, size, -1)
        if groups > 1:
            k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
        shares = self._shares(q.transpose(2, 3) @ k + step.mask)
        # [head, dim, token] before the heads become channels, as in `layers.Attention`.
        seen = v @ shares.transpose(2, 3)
        out: Tensor = self.o(seen.reshape(1, self._heads * size, -1, 1))
        return out

    def _shares(self, scores: Tensor) -> Tensor:
        """Softmax of [1, heads, T, T] over the last axis and the sink, without the sink's share."""
        largest = torch.maximum(scores.amax(-1, keepdim=True), self.sinks)
        shares = (scores - largest).exp()
        return shares / (shares.sum(-1, keepdim=True) + (self.sinks - largest).exp())


def _pairs_apart(order: Tensor, size: int) -> Tensor:
    """Channels of heads, [heads * size], with each head's even ones before its odd ones."""
    return order.view(-1, size // 2, 2).transpose(1, 2).reshape(-1)
