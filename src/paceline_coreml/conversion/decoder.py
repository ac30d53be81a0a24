"""Common parts of decoders: self-attention, and residual layers.

Uses the tensor names that all of transformers' decoders share; works for any family.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from paceline_coreml.conversion.layers import (
    Attention,
    GatedFeedForward,
    LayerInputs,
    RMSNorm,
    apply_rope,
    projection,
    query_order,
)


class Layer(nn.Module):
    """A pre-norm residual layer: x + mix(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self, before: RMSNorm, mix: nn.Module, between: RMSNorm, feed_forward: nn.Module
    ) -> None:
        """Wrap `mix`, attention or a convolution: it gets the normed stream and `LayerInputs`."""
        super().__init__()
        self.before, self.mix = before, mix
        self.between, self.feed_forward = between, feed_forward

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        x = x + self.mix(self.before(x), inputs)
        out: Tensor = x + self.feed_forward(self.between(x))
        return out


class AttentionSizes(NamedTuple):
    queries: int
    keys: int
    """Number of key heads, equal to the number of value heads."""
    size: int
    """Channels per head."""


class SelfAttention(nn.Module):
    """A causal self-attention with its projections, head norms and RoPE.

    Reads `q_proj`, `k_proj`, `v_proj` and the matrix named `out`.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        heads: AttentionSizes,
        slots: int,
        *,
        bias: bool = False,
        out: str = "o_proj",
        rotary_dim: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm_after_rope: bool = False,
    ) -> None:
        """Rotate `rotary_dim` dimensions of each head, or all. Norms are per head, on axis 2."""
        super().__init__()
        order = query_order(*heads)
        self.q = linear(weights, "q_proj", bias=bias, rows=order)
        self.k = linear(weights, "k_proj", bias=bias)
        self.v = linear(weights, "v_proj", bias=bias)
        self.q_norm, self.k_norm = q_norm or nn.Identity(), k_norm or nn.Identity()
        self.attention = Attention(*heads, slots)
        self.o = linear(weights, out, bias=bias, columns=order)
        self._rope_sizes = heads.size, rotary_dim
        self._norm_after_rope = norm_after_rope

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        q, k, v = self.attention.by_head(self.q(x), self.k(x), self.v(x))
        q = self._norm_and_rotate(q, self.q_norm, inputs)
        k = self._norm_and_rotate(k, self.k_norm, inputs)
        out: Tensor = self.o(self.attention(q, k, v, inputs))
        return out

    def _norm_and_rotate(self, x: Tensor, norm: nn.Module, inputs: LayerInputs) -> Tensor:
        if self._norm_after_rope:
            normed: Tensor = norm(apply_rope(x, inputs, *self._rope_sizes))
            return normed
        return apply_rope(norm(x), inputs, *self._rope_sizes)


def llama_layer(weights: Mapping[str, Tensor], attention: nn.Module, eps: float) -> Layer:
    """Return Llama's layer around an attention: two norms and a gated feed-forward network."""
    return Layer(
        RMSNorm(weights["input_layernorm.weight"], eps),
        attention,
        RMSNorm(weights["post_attention_layernorm.weight"], eps),
        GatedFeedForward(
            weights["mlp.gate_proj.weight"],
            weights["mlp.up_proj.weight"],
            weights["mlp.down_proj.weight"],
        ),
    )


def linear(
    weights: Mapping[str, Tensor],
    name: str,
    *,
    bias: bool = False,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> nn.Conv2d:
    """Return a checkpoint's linear map `name` as a projection, with rows or columns reordered."""
    weight = weights[f"{name}.weight"]
    added = weights[f"{name}.bias"] if bias else None
    if rows is not None:
        weight, added = weight[rows], added[rows] if added is not None else None
    if columns is not None:
        weight = weight[:, columns]
    return projection(weight, added)


def channels(vector: Tensor) -> nn.Parameter:
    """Return a vector [n] as [1, n, 1, 1], one value per channel."""
    return nn.Parameter(vector.view(1, -1, 1, 1), requires_grad=False)
