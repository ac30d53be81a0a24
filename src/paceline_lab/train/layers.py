"""Parts of a drafter's network in torch, for training."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


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


class Rope:
    """RoPE, half rotation: cos and sin for the positions of n rows."""

    def __init__(self, positions: Tensor, head_dim: int, theta: float) -> None:
        """`positions` [n]."""
        half = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
        angles = positions.float()[:, None] / theta**half
        angles = torch.cat([angles, angles], dim=-1)
        self._cos, self._sin = angles.cos(), angles.sin()

    def rotate(self, x: Tensor) -> Tensor:
        """[heads, n, head_dim] -> the same, rotated."""
        left, right = x.float().chunk(2, dim=-1)
        rotated = torch.cat([-right, left], dim=-1)
        return (x.float() * self._cos + rotated * self._sin).to(x.dtype)


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


def initialise(network: nn.Module) -> None:
    """Draw matrices of a network of one layer from a normal distribution.

    The standard deviation is 0.02, less for the two that add to the residual stream.
    """
    for name, weight in network.named_parameters():
        if weight.dim() == 2:
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 * (2**-0.5 if into_stream else 1.0))
