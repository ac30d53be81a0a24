"""DFlash in torch, for training: several blocks of a text in one forward pass.

The architecture is the public one (arXiv 2602.06036; z-lab's `DFlashDraftModel`), as in
`drafters/dflash`. Blocks at several anchors share a text's context: the block at anchor a attends
to the tapped hidden states of the tokens before a, and to itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from paceline.drafters.dflash import Config


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in x's dtype."""
        wide = x.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (wide * root).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Queries from the block; keys and values from context and block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(d, self.heads * hd, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(self.heads * hd, d, bias=False)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps)
        self.k_norm = RMSNorm(hd, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, rope: "Rope", mask: Tensor) -> Tensor:
        """X [S, R, d], context [S, L, d], mask [S, 1, R, L + R] bool (True: attend)."""
        s, rows, _ = x.shape
        both = torch.cat([context, x], dim=1)
        q = self.q_norm(self.q_proj(x).view(s, rows, self.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(both).view(s, both.shape[1], self.kv_heads, -1))
        v = self.v_proj(both).view(s, both.shape[1], self.kv_heads, -1).transpose(1, 2)
        q, k = rope.rotate(q, last=rows), rope.rotate(k.transpose(1, 2))
        shares = self.heads // self.kv_heads
        k, v = k.repeat_interleave(shares, dim=1), v.repeat_interleave(shares, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        joined: Tensor = self.o_proj(out.transpose(1, 2).reshape(s, rows, -1))
        return joined


class Rope:
    """RoPE, half rotation: cos and sin for the positions of context and block rows."""

    def __init__(self, positions: Tensor, head_dim: int, theta: float) -> None:
        """`positions` [S, L + R]."""
        half = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
        angles = positions.float()[:, None, :, None] / theta**half
        angles = torch.cat([angles, angles], dim=-1)
        self._cos, self._sin = angles.cos(), angles.sin()

    def rotate(self, x: Tensor, last: int | None = None) -> Tensor:
        """Rotate [S, heads, n, head_dim] to all positions, or to the `last` ones."""
        start = 0 if last is None else self._cos.shape[2] - last
        cos, sin = self._cos[:, :, start:], self._sin[:, :, start:]
        left, right = x.float().chunk(2, dim=-1)
        return (x.float() * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU of width `d`, with `ff` inner values."""

    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, ff, bias=False)
        self.up_proj = nn.Linear(d, ff, bias=False)
        self.down_proj = nn.Linear(ff, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A transformer layer: attention and feed-forward, each with a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, rope: Rope, mask: Tensor) -> Tensor:
        """X [S, R, d] -> [S, R, d]."""
        x = x + self.self_attn(self.input_layernorm(x), context, rope, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(nn.Module):
    """The drafter's own weights, under the names that z-lab's checkpoints give them."""

    def __init__(self, config: Config, std: Tensor | None = None) -> None:
        """Initialise with random weights.

        `std` [taps * d] is the standard deviation of the tapped hidden states, by which training
        divides them: late layers are ten times as large as early ones. A checkpoint has it in `fc`.
        """
        super().__init__()
        self.config = config
        self.std: Tensor
        given = torch.ones(config.tapped_size) if std is None else std
        self.register_buffer("std", given, persistent=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(config.tapped_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        initialise(self, config.num_hidden_layers)

    def forward(self, tapped: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """Final hidden states of blocks, the input of the target's head.

        Args:
            tapped: [S, L, taps * d], hidden states of a text's tokens.
            embedded: [S, A, B, d], embeddings of each block: its first token, then mask tokens.
            anchors: [S, A], the position of each block's first token.

        Returns:
            [S, A, B, d]; row i of a block predicts the token at its position i.
        """
        s, count, block, d = embedded.shape
        length = tapped.shape[1]
        context = self.hidden_norm(self.fc(tapped / self.std))
        places = anchors[..., None] + torch.arange(block, device=anchors.device)
        past = torch.arange(length, device=anchors.device)
        positions = torch.cat([past.expand(s, -1), places.flatten(1)], dim=1)
        rope = Rope(positions, self.config.head_dim, self.config.rope_theta)
        x = embedded.reshape(s, count * block, d)
        masks = {
            window: _mask(anchors, places, length, window, causal=self.config.is_causal(window))
            for window in set(self.config.windows)
        }
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            x = layer(x, context, rope, masks[window])
        out: Tensor = self.norm(x).view(s, count, block, d)
        return out

    def weights(self) -> dict[str, Tensor]:
        """Name -> tensor, as in a checkpoint."""
        weights = dict(self.state_dict())
        weights["fc.weight"] = weights["fc.weight"] / self.std
        return weights

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load the weights of a checkpoint."""
        taken = {name: torch.as_tensor(weights[name]) for name in self.state_dict()}
        taken["fc.weight"] = taken["fc.weight"] * self.std
        self.load_state_dict(taken)


def initialise(network: nn.Module, layers: int) -> None:
    """Draw matrices from a normal distribution: 0.02, less for those that add to the stream."""
    for name, weight in network.named_parameters():
        if weight.dim() == 2:
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 * ((2 * layers) ** -0.5 if into_stream else 1.0))


def _mask(
    anchors: Tensor, places: Tensor, length: int, window: int | None, *, causal: bool
) -> Tensor:
    """[S, 1, A * B, L + A * B]: a block attends to what is before its anchor, and to itself."""
    s, count, block = places.shape
    rows = places.flatten(1)  # [S, A * B]
    past = torch.arange(length, device=anchors.device)
    before = past[None, None] < anchors[..., None]  # [S, A, L]
    before = before.repeat_interleave(block, dim=1)
    own = torch.arange(count, device=anchors.device).repeat_interleave(block)
    together = (own[:, None] == own[None]).expand(s, -1, -1)
    mask = torch.cat([before, together], dim=2)
    positions = torch.cat([past.expand(s, -1), rows], dim=1)
    behind = rows[..., None] - positions[:, None]
    if causal:
        mask &= behind >= 0
    if window is not None:
        mask &= behind.abs() < window
    return mask[:, None]
