"""ZAYA1: attention over convolved queries and keys, then one of many experts, or none.

Knows transformers' `zaya`, and counts layers as it does: one has both halves, so that ZAYA1-8B has
40. The rule: what one layer's router says to the next goes along in the stream, behind the hidden
state, so that a shard may end after any layer.

transformers adds in float32 what goes from layer to layer; on the Neural Engine it is float16.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.tools.coreml.checkpoint import under
from paceline.tools.coreml.decoder import linear
from paceline.tools.coreml.expect import expect, expect_layer_types, refusal
from paceline.tools.coreml.experts import Experts, Stack
from paceline.tools.coreml.families.zaya_router import Router, Routing
from paceline.tools.coreml.family import Shape, Tables
from paceline.tools.coreml.layers import Attention, RMSNorm, Step, Window, grouped, projection, turn
from paceline.tools.coreml.rotary import rotary_tables

LAGS = 2
"""Rows that a query, a key looks back to: two convolutions of two taps, one after the other."""


class Zaya:
    """See `Family`.

    `routing` says which experts a row has: "top-1", as the model was trained, or "soft", all of
    them, each by its probability (another model, to be compared with).
    """

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        *,
        slots: int,
        ring: int,
        routing: Routing = "top-1",
    ) -> None:
        """Take a checkpoint.

        Raises:
            ModelError: the config asks for what is not implemented here.
        """
        expect_layer_types(config, "hybrid")
        expect(config, "cca_time0", 2)
        expect(config, "cca_time1", 2)
        expect(config, "num_experts_per_tok", 1)
        expect(config, "hidden_act", "silu")
        expect(config, "attention_bias", False)
        expect(config, "lm_head_bias", False)
        rope_type = config.rope_parameters["hybrid"]["rope_type"]
        if rope_type != "default":
            raise refusal(config, "rope_type", rope_type, "'default'")
        self._config, self._weights = config, weights
        self._slots, self._ring, self._routing = slots, ring, routing
        self.shape = Shape(
            family="zaya",
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            stream_size=config.hidden_size + config.router_hidden_size,
            lags=LAGS,
        )

    def layer(self, index: int) -> nn.Module:
        """See `Family`."""
        weights = under(self._weights, f"model.layers.{index}.")
        return Layer(
            self._config, weights, slots=self._slots, ring=self._ring, routing=self._routing
        )

    def embeddings(self) -> Tensor:
        """See `Family`."""
        model = under(self._weights, "model.")
        shifted = model["embed_tokens.weight"] + model["input_hidden_states_bias"]
        return shifted * model["input_hidden_states_scale"]

    def final(self) -> nn.Module:
        """See `Family`."""
        norm = RMSNorm(self._weights["model.norm.weight"], self._config.rms_norm_eps)
        return Final(norm, self._config.hidden_size)

    def head(self) -> Tensor:
        """See `Family`."""
        tied = self._config.tie_word_embeddings
        return self._weights["model.embed_tokens.weight" if tied else "lm_head.weight"]

    def tables(self) -> Tables:
        """See `Family`."""
        from transformers.models.zaya.modeling_zaya import ZayaRotaryEmbedding

        made = ZayaRotaryEmbedding(self._config)
        hybrid = SimpleNamespace(
            inv_freq=made.hybrid_inv_freq, attention_scaling=made.hybrid_attention_scaling
        )
        return rotary_tables(hybrid, self._slots)


class Final(nn.Module):
    """The last norm, of the hidden state alone."""

    def __init__(self, norm: RMSNorm, hidden_size: int) -> None:
        super().__init__()
        self.norm, self._size = norm, hidden_size

    def forward(self, stream: Tensor) -> Tensor:
        """[1, stream_size, T, 1] -> [1, hidden_size, T, 1]."""
        out: Tensor = self.norm(stream[:, : self._size])
        return out


class Layer(nn.Module):
    """Attention, then experts; each merged with what came in by scales and biases of both."""

    def __init__(
        self, config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int, routing: Routing
    ) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        experts = under(weights, "mlp.experts.")
        gate, up = experts["gate_up_proj"].chunk(2, dim=1)
        self._size = config.hidden_size
        self.before = RMSNorm(weights["input_layernorm.weight"], eps)
        self.attention = ConvolvedAttention(config, under(weights, "self_attn."), slots, ring)
        self.merge_attention = Merge(under(weights, "post_attention_residual_scale."))
        self.between = RMSNorm(weights["post_attention_layernorm.weight"], eps)
        self.router = Router(under(weights, "mlp.gate."), eps, routing)
        self.experts = Experts(Stack(gate), Stack(up), Stack(experts["down_proj"]))
        self.merge_experts = Merge(under(weights, "post_mlp_residual_scale."))

    def forward(self, stream: Tensor, step: Step) -> Tensor:
        """[1, hidden_size + router_hidden_size, T, 1] to the same."""
        x, state = stream[:, : self._size], stream[:, self._size :]
        x = self.merge_attention(self.attention(self.before(x), step), x)
        normed = self.between(x)
        weights, state = self.router(normed, state)
        x = self.merge_experts(self.experts(normed, weights), x)
        return torch.cat([x, state], dim=1)


class Merge(nn.Module):
    """(new + bias) * scale + (old + its bias) * its scale."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.new_bias = _channels(weights["hidden_states_bias"])
        self.new_scale = _channels(weights["hidden_states_scale"])
        self.old_bias = _channels(weights["residual_bias"])
        self.old_scale = _channels(weights["residual_scale"])

    def forward(self, new: Tensor, old: Tensor) -> Tensor:
        """Both [1, d, T, 1], as is what comes of them."""
        return (new + self.new_bias) * self.new_scale + (old + self.old_bias) * self.old_scale


class ConvolvedAttention(nn.Module):
    """Compressed Convolutional Attention (arXiv 2510.04476).

    Queries and keys are convolved over time; the mean of the query's and the key's projections is
    added to both. Of the values the first half is the row's own, the second the row's before.

    Query heads are in the order of `grouped` throughout, the convolutions' channels with them.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor], slots: int, ring: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = config.head_dim
        q, k = heads * size, kv_heads * size
        order = grouped(heads, kv_heads, size)
        both = torch.cat([order, torch.arange(q, q + k)])
        of = under(weights, "qkv_proj.")
        self._groups, self._q, self._qk, self._size = heads // kv_heads, q, q + k, size
        rope = config.rope_parameters["hybrid"]
        self._turned = int(size * rope.get("partial_rotary_factor", 1.0))
        # Queries, keys, delayed values, values: the first three are what later rows look back to.
        self.project = projection(
            torch.cat(
                [
                    of["q_proj.weight"][order],
                    of["k_proj.weight"],
                    of["v_proj_delayed.weight"],
                    of["v_proj_current.weight"],
                ]
            )
        )
        self._recent = q + k + k // 2
        self.recent = Window(self._recent, ring)
        self.convolve = Convolutions(
            of["conv_qk_depthwise.weight"][both],
            of["conv_qk_depthwise.bias"][both],
            of["conv_qk_grouped.weight"][both],
            of["conv_qk_grouped.bias"][both],
        )
        temperature = weights["qk_norm.temp"].view(1, -1, 1, 1)
        self.temperature = nn.Parameter(temperature, requires_grad=False)
        self.attention = Attention(heads, kv_heads, size, slots)
        self.o = linear(weights, "o_proj", columns=order)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[1, d, T, 1] -> [1, d, T, 1]."""
        projected = self.project(x)
        now = projected[:, : self._recent]
        before, earlier = self.recent(now, step, LAGS)
        qk = now[:, : self._qk]
        mixed = self.convolve(qk, before[:, : self._qk], earlier[:, : self._qk])
        q_mean, k_mean = self._means(qk)
        q, k, v = self.attention.by_head(
            mixed[:, : self._q] + q_mean,
            mixed[:, self._q :] + k_mean,
            torch.cat([projected[:, self._recent :], before[:, self._qk :]], dim=1),
        )
        q = turn(unit(q), step, self._size, self._turned)
        k = turn(unit(k) * self.temperature, step, self._size, self._turned)
        out: Tensor = self.o(self.attention(q, k, v, step))
        return out

    def _means(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Of each query and its key; and for each key of those of its queries.

        [1, (heads + kv_heads) * head_dim, T, 1] -> [1, heads * head_dim, T, 1] and
        [1, kv_heads * head_dim, T, 1].
        """
        queries, key = qk[:, : self._q].chunk(self._groups, dim=1), qk[:, self._q :]
        means = [(query + key) * 0.5 for query in queries]
        return torch.cat(means, dim=1), sum(means[1:], means[0]) * (1 / self._groups)


class Convolutions(nn.Module):
    """Two convolutions over time of two taps each: channel by channel, then within each head.

    As products and convolutions of one pixel: the Neural Engine leaves depthwise ones to the CPU.
    """

    def __init__(
        self, depthwise: Tensor, depthwise_bias: Tensor, within: Tensor, within_bias: Tensor
    ) -> None:
        """Weights [n, 1, 2] and [n, head_dim, 2], earlier tap first; biases [n]."""
        super().__init__()
        self.first_before = _channels(depthwise[:, 0, 0])
        self.first_now = _channels(depthwise[:, 0, 1])
        self.first_bias = _channels(depthwise_bias)
        self.second_before = _within_heads(within[:, :, 0])
        self.second_now = _within_heads(within[:, :, 1], within_bias)

    def forward(self, now: Tensor, before: Tensor, earlier: Tensor) -> Tensor:
        """A row, the one before it and the one before that, each [1, n, T, 1], as is the result."""
        first_now = before * self.first_before + now * self.first_now + self.first_bias
        first_before = earlier * self.first_before + before * self.first_now + self.first_bias
        out: Tensor = self.second_before(first_before) + self.second_now(first_now)
        return out


def unit(x: Tensor) -> Tensor:
    """[1, heads, n, T] with |x| = sqrt(n) over n, by numbers that float16 can hold.

    Divided by the largest before, the mean of squares is at least 1/n: the bound below it only
    acts where all are next to 0, and keeps 0 from becoming NaN.
    """
    y = x / x.abs().amax(2, keepdim=True).clamp(_LEAST, _MOST)
    return y * torch.rsqrt((y * y).mean(2, keepdim=True).clamp(_LEAST, _MOST))


_LEAST, _MOST = 2.0**-14, 65504.0
"""float16's smallest number of full precision, and its largest."""


def _channels(vector: Tensor) -> nn.Parameter:
    return nn.Parameter(vector.view(1, -1, 1, 1), requires_grad=False)


def _within_heads(weight: Tensor, bias: Tensor | None = None) -> nn.Conv2d:
    """[n, head_dim]: each channel of its own head's."""
    n, size = weight.shape
    conv = nn.Conv2d(n, n, 1, groups=n // size, bias=bias is not None)
    conv.weight = nn.Parameter(weight[:, :, None, None].contiguous(), requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias, requires_grad=False)
    return conv
