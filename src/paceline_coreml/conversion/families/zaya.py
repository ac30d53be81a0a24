"""ZAYA1: attention over convolved queries and keys, then one of many experts, or none.

Layers are counted as in transformers' `zaya`: each has both halves, so ZAYA1-8B has 40.

Invariant: the stream contains the router's state after the hidden state, so that a shard may end
after any layer. The residual stream is float16 on the Neural Engine, but float32 in transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from paceline_coreml.conversion.checkpoint import Prefixed
from paceline_coreml.conversion.config_checks import check_field, check_layer_types, unsupported
from paceline_coreml.conversion.decoder import channels, linear
from paceline_coreml.conversion.experts import Experts, Stack, top_k_mask
from paceline_coreml.conversion.family import Family, rotary_of
from paceline_coreml.conversion.layers import (
    Attention,
    ConvState,
    LayerInputs,
    RMSNorm,
    apply_rope,
    projection,
    query_order,
)

Routing = Literal["top-1", "soft"]
"""The most probable expert only, or all experts; both are weighted by probability."""

LAGS = 2
"""Previous rows that a query or key depends on: two consecutive convolutions with two taps."""


class Zaya(Family):
    """A ZAYA1 model with `routing` "top-1", as trained, or "soft", all experts (for comparison)."""

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        *,
        slots: int,
        conv_slots: int,
        routing: Routing = "top-1",
    ) -> None:
        check_layer_types(config, "hybrid")
        check_field(config, "cca_time0", 2)
        check_field(config, "cca_time1", 2)
        check_field(config, "num_experts_per_tok", 1)
        check_field(config, "hidden_act", "silu")
        check_field(config, "attention_bias", False)
        check_field(config, "lm_head_bias", False)
        rope_type = config.rope_parameters["hybrid"]["rope_type"]
        if rope_type != "default":
            raise unsupported(config, "rope_type", rope_type, "'default'")
        rotary = rotary_of(config)
        super().__init__(
            config,
            weights,
            slots=slots,
            layer=lambda _, tensors: ZayaLayer(
                config, tensors, slots=slots, conv_slots=conv_slots, routing=routing
            ),
            rotary=SimpleNamespace(
                inv_freq=rotary.hybrid_inv_freq, attention_scaling=rotary.hybrid_attention_scaling
            ),
            eps=config.rms_norm_eps,
            lags=LAGS,
        )
        stream_size = config.hidden_size + config.router_hidden_size
        self.shape = replace(self.shape, stream_size=stream_size)

    def embeddings(self) -> Tensor:
        model = Prefixed(self._weights, "model.")
        shifted = super().embeddings() + model["input_hidden_states_bias"]
        return shifted * model["input_hidden_states_scale"]

    def final(self) -> nn.Module:
        return Final(super().final(), self.shape.hidden_size)

    def head(self) -> Tensor | None:
        # A tied head uses the embeddings without scale and bias.
        return super().embeddings() if self._tied else super().head()


class Final(nn.Module):
    def __init__(self, norm: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.norm, self._size = norm, hidden_size

    def forward(self, stream: Tensor) -> Tensor:
        """Norm the hidden state: [1, stream_size, T, 1] -> [1, hidden_size, T, 1]."""
        out: Tensor = self.norm(stream[:, : self._size])
        return out


class ZayaLayer(nn.Module):
    """A layer of attention, then experts; `Merge` adds each to the residual."""

    merged: Mapping[str, str] = MappingProxyType(
        {
            "attention.o.weight": "merge_attention.new_scale",
            "experts.downs.0.weight": "merge_experts.new_scale",
        }
    )
    """Weight -> scale of its outputs, which the converter may multiply into it."""

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        *,
        slots: int,
        conv_slots: int,
        routing: Routing,
    ) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        experts = Prefixed(weights, "mlp.experts.")
        gate, up = experts["gate_up_proj"].chunk(2, dim=1)
        self._size = config.hidden_size
        self.before = RMSNorm(weights["input_layernorm.weight"], eps)
        self.attention = ConvolvedAttention(
            config, Prefixed(weights, "self_attn."), slots, conv_slots
        )
        self.merge_attention = Merge(Prefixed(weights, "post_attention_residual_scale."))
        self.between = RMSNorm(weights["post_attention_layernorm.weight"], eps)
        self.router = ExpertRouter(Prefixed(weights, "mlp.gate."), eps, routing)
        self.experts = Experts(Stack(gate), Stack(up), Stack(experts["down_proj"]))
        self.merge_experts = Merge(Prefixed(weights, "post_mlp_residual_scale."))

    def forward(self, stream: Tensor, inputs: LayerInputs) -> Tensor:
        """Run a stream [1, hidden_size + router_hidden_size, T, 1], to the same shape."""
        x, state = stream[:, : self._size], stream[:, self._size :]
        x = self.merge_attention(self.attention(self.before(x), inputs), x)
        normed = self.between(x)
        weights, state = self.router(normed, state)
        x = self.merge_experts(self.experts(normed, weights), x)
        return torch.cat([x, state], dim=1)


class ExpertRouter(nn.Module):
    """A small network with a state that each layer passes to the next.

    The last class is "no expert": a row that picks it skips the experts (adds 0). Soft routing does
    not redistribute its probability. The balancing biases, which equalized the experts' load in
    training, affect only the pick; an expert's weight is its plain probability.
    """

    def __init__(self, weights: Mapping[str, Tensor], eps: float, routing: Routing) -> None:
        super().__init__()
        self.down = linear(weights, "down_proj", bias=True)
        # The first layer has no previous router.
        scale = weights.get("router_states_scale")
        self.carry = None if scale is None else channels(scale)
        self.norm = RMSNorm(weights["router_mlp.norm.weight"], eps)
        self.first = linear(weights, "router_mlp.fc1", bias=True)
        self.second = linear(weights, "router_mlp.fc2", bias=True)
        self.out = linear(weights, "router_mlp.out_proj")
        self.biases = channels(weights["balancing_biases"])
        self._experts, self._routing = self.biases.shape[1] - 1, routing

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Route x [1, d, T, 1], with the previous layer's state [1, router_hidden_size, T, 1].

        Returns the experts' weights [1, experts, T, 1] and the next layer's state.
        """
        new = self.down(x)
        if self.carry is not None:
            new = new + state * self.carry
        inner = F.gelu(self.second(F.gelu(self.first(self.norm(new)))))
        probabilities = self.out(inner).softmax(1)
        if self._routing == "soft":
            return probabilities[:, : self._experts], new
        picked = top_k_mask(probabilities + self.biases, 1)
        return (probabilities * picked)[:, : self._experts], new


class Merge(nn.Module):
    """The sum (new + new_bias) * new_scale + (old + old_bias) * old_scale."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.new_bias = channels(weights["hidden_states_bias"])
        self.new_scale = channels(weights["hidden_states_scale"])
        self.old_bias = channels(weights["residual_bias"])
        self.old_scale = channels(weights["residual_scale"])

    def forward(self, new: Tensor, old: Tensor) -> Tensor:
        """Merge two tensors [1, d, T, 1], to the same shape."""
        return (new + self.new_bias) * self.new_scale + (old + self.old_bias) * self.old_scale


class ConvolvedAttention(nn.Module):
    """Compressed Convolutional Attention (arXiv 2510.04476).

    Queries and keys are convolved over time, and the mean of their projections is added to both.
    The first half of each value is from its own row, the second half from the row before.

    Query heads and the convolutions' channels are always in `query_order`.
    """

    def __init__(
        self, config: Any, weights: Mapping[str, Tensor], slots: int, conv_slots: int
    ) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = config.head_dim
        q, k = heads * size, kv_heads * size
        order = query_order(heads, kv_heads, size)
        both = torch.cat([order, torch.arange(q, q + k)])
        tensors = Prefixed(weights, "qkv_proj.")
        self._groups, self._q, self._qk, self._size = heads // kv_heads, q, q + k, size
        rope = config.rope_parameters["hybrid"]
        self._rotary_dim = int(size * rope.get("partial_rotary_factor", 1.0))
        # Queries, keys, delayed values, values; later rows read the first three.
        self.project = projection(
            torch.cat(
                [
                    tensors["q_proj.weight"][order],
                    tensors["k_proj.weight"],
                    tensors["v_proj_delayed.weight"],
                    tensors["v_proj_current.weight"],
                ]
            )
        )
        self._recent = q + k + k // 2
        self.conv_state = ConvState(self._recent, conv_slots)
        self.convolve = Convolutions(
            tensors["conv_qk_depthwise.weight"][both],
            tensors["conv_qk_depthwise.bias"][both],
            tensors["conv_qk_grouped.weight"][both],
            tensors["conv_qk_grouped.bias"][both],
        )
        temperature = weights["qk_norm.temp"].view(1, -1, 1, 1)
        self.temperature = nn.Parameter(temperature, requires_grad=False)
        self.attention = Attention(heads, kv_heads, size, slots)
        self.o = linear(weights, "o_proj", columns=order)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        projected = self.project(x)
        now = projected[:, : self._recent]
        before, earlier = self.conv_state(now, inputs, LAGS)
        qk = now[:, : self._qk]
        mixed = self.convolve(qk, before[:, : self._qk], earlier[:, : self._qk])
        q_mean, k_mean = self._means(qk)
        q, k, v = self.attention.by_head(
            mixed[:, : self._q] + q_mean,
            mixed[:, self._q :] + k_mean,
            torch.cat([projected[:, self._recent :], before[:, self._qk :]], dim=1),
        )
        q = apply_rope(unit(q), inputs, self._size, self._rotary_dim)
        k = apply_rope(unit(k) * self.temperature, inputs, self._size, self._rotary_dim)
        out: Tensor = self.o(self.attention(q, k, v, inputs))
        return out

    def _means(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of each query and its key, and per key the mean of those means.

        [1, (heads + kv_heads) * head_dim, T, 1] -> [1, heads * head_dim, T, 1] and
        [1, kv_heads * head_dim, T, 1].
        """
        queries, key = qk[:, : self._q].chunk(self._groups, dim=1), qk[:, self._q :]
        means = [(query + key) * 0.5 for query in queries]
        return torch.cat(means, dim=1), sum(means[1:], means[0]) * (1 / self._groups)


class Convolutions(nn.Module):
    """Two convolutions over time with two taps each: depthwise, then within heads.

    They are products and 1x1 convolutions, because Core ML runs depthwise ones on the CPU.
    """

    def __init__(
        self, depthwise: Tensor, depthwise_bias: Tensor, within: Tensor, within_bias: Tensor
    ) -> None:
        """Read weights [n, 1, 2] and [n, head_dim, 2], earlier tap first, and biases [n]."""
        super().__init__()
        self.first_before = channels(depthwise[:, 0, 0])
        self.first_now = channels(depthwise[:, 0, 1])
        self.first_bias = channels(depthwise_bias)
        self.second_before = _within_heads(within[:, :, 0])
        self.second_now = _within_heads(within[:, :, 1], within_bias)

    def forward(self, now: Tensor, before: Tensor, earlier: Tensor) -> Tensor:
        """Convolve the rows at lags 0, 1 and 2, [1, n, T, 1] each, to the same shape."""
        first_now = before * self.first_before + now * self.first_now + self.first_bias
        first_before = earlier * self.first_before + before * self.first_now + self.first_bias
        out: Tensor = self.second_before(first_before) + self.second_now(first_now)
        return out


def unit(x: Tensor) -> Tensor:
    """Scale [1, heads, n, T] to |x| = sqrt(n) over n, with intermediates in float16's range.

    After division by the largest magnitude, the mean of squares is at least 1/n. The lower bound
    thus only affects rows near 0, and keeps 0 from becoming NaN.
    """
    y = x / x.abs().amax(2, keepdim=True).clamp(_MIN_NORMAL, _MAX)
    return y * torch.rsqrt((y * y).mean(2, keepdim=True).clamp(_MIN_NORMAL, _MAX))


_MIN_NORMAL, _MAX = 2.0**-14, 65504.0
"""float16's smallest normal number, and its largest number."""


def _within_heads(weight: Tensor, bias: Tensor | None = None) -> nn.Conv2d:
    """Return a convolution by [n, head_dim]: output channels read the channels of their head."""
    n, size = weight.shape
    conv = nn.Conv2d(n, n, 1, groups=n // size, bias=bias is not None)
    conv.weight = nn.Parameter(weight[:, :, None, None].contiguous(), requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias, requires_grad=False)
    return conv
