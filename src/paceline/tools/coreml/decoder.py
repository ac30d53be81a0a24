"""What decoders have in common: their two ends, self-attention, and layers that add to a stream.

Knows how transformers names the tensors that all of them have. Knows no family: each says what its
layers are made of.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from paceline.tools.coreml.checkpoint import under
from paceline.tools.coreml.family import Shape, Tables
from paceline.tools.coreml.layers import (
    Attention,
    GatedFeedForward,
    RMSNorm,
    Step,
    grouped,
    projection,
    turn,
)
from paceline.tools.coreml.rotary import rotary_tables


class Decoder:
    """A `Family` that is told how to make a layer."""

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        *,
        slots: int,
        layer: Callable[[int, Mapping[str, Tensor]], nn.Module],
        rotary: Any,
        norm: str,
        eps: float,
        lags: int = 0,
    ) -> None:
        """Put a family together.

        Args:
            config: see `Family`.
            weights: see `Family`.
            slots: see `Family`.
            layer: makes a layer from its number and its own tensors.
            rotary: transformers' rotary embedding for the config.
            norm: the name of the last norm's weight.
            eps: of the last norm.
            lags: see `Shape`.
        """
        self.shape = Shape(
            family=config.model_type,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            stream_size=config.hidden_size,
            lags=lags,
        )
        self._weights, self._slots = weights, slots
        self._layer, self._rotary, self._norm, self._eps = layer, rotary, norm, eps
        self._tied = config.tie_word_embeddings

    def layer(self, index: int) -> nn.Module:
        """See `Family`."""
        return self._layer(index, under(self._weights, f"model.layers.{index}."))

    def embeddings(self) -> Tensor:
        """See `Family`."""
        return self._weights["model.embed_tokens.weight"]

    def final(self) -> nn.Module:
        """See `Family`."""
        return RMSNorm(self._weights[self._norm], self._eps)

    def head(self) -> Tensor:
        """See `Family`."""
        return self.embeddings() if self._tied else self._weights["lm_head.weight"]

    def tables(self) -> Tables:
        """See `Family`."""
        return rotary_tables(self._rotary, self._slots)


class Layer(nn.Module):
    """Rows are mixed and then fed forward, each from a norm of the stream and added to it."""

    def __init__(
        self, before: RMSNorm, mix: nn.Module, between: RMSNorm, feed_forward: nn.Module
    ) -> None:
        """`mix` takes the normed stream and the `Step`, `feed_forward` the normed stream."""
        super().__init__()
        self.before, self.mix = before, mix
        self.between, self.feed_forward = between, feed_forward

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[1, d, T, 1] -> [1, d, T, 1]."""
        x = x + self.mix(self.before(x), step)
        out: Tensor = x + self.feed_forward(self.between(x))
        return out


class Heads(NamedTuple):
    """How attention is divided."""

    queries: int
    keys: int
    """Heads of keys and of values."""
    size: int
    """Channels of a head."""


class SelfAttention(nn.Module):
    """Attention of a row to itself and those before, with its projections and rotary turns.

    Reads `q_proj`, `k_proj`, `v_proj` and the matrix named `out`.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        heads: Heads,
        slots: int,
        *,
        bias: bool = False,
        out: str = "o_proj",
        turned: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm_turned: bool = False,
    ) -> None:
        """`turned` dimensions of a head turn, or all. Norms are for each head, axis 2.

        They come before the turn unless `norm_turned`.
        """
        super().__init__()
        order = grouped(*heads)
        self.q = linear(weights, "q_proj", bias=bias, rows=order)
        self.k = linear(weights, "k_proj", bias=bias)
        self.v = linear(weights, "v_proj", bias=bias)
        self.q_norm, self.k_norm = q_norm or nn.Identity(), k_norm or nn.Identity()
        self.attention = Attention(*heads, slots)
        self.o = linear(weights, out, bias=bias, columns=order)
        self._turned = heads.size, turned
        self._norm_turned = norm_turned

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[1, d, T, 1] -> [1, d, T, 1]."""
        q, k, v = self.attention.by_head(self.q(x), self.k(x), self.v(x))
        q, k = self._placed(q, self.q_norm, step), self._placed(k, self.k_norm, step)
        out: Tensor = self.o(self.attention(q, k, v, step))
        return out

    def _placed(self, x: Tensor, norm: nn.Module, step: Step) -> Tensor:
        if self._norm_turned:
            normed: Tensor = norm(turn(x, step, *self._turned))
            return normed
        return turn(norm(x), step, *self._turned)


def usual_layer(config: Any, weights: Mapping[str, Tensor], attention: nn.Module) -> Layer:
    """A layer as Llama has it, around an attention: two norms and a gated feed-forward network."""
    eps = config.rms_norm_eps
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
    """A checkpoint's linear map `name` as a projection, with its rows or columns in an order."""
    weight = weights[f"{name}.weight"]
    added = weights[f"{name}.bias"] if bias else None
    if rows is not None:
        weight, added = weight[rows], added[rows] if added is not None else None
    if columns is not None:
        weight = weight[:, columns]
    return projection(weight, added)
