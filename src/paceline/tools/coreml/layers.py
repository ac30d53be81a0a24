"""What every family's layers are made of, in the Neural Engine's layout: [1, channels, T, 1].

Knows projections as convolutions of one pixel, norms that hold in float16, rotary turns and slots
for what is remembered. Knows no family. The rule: T is only ever the length of an axis. Nothing is
reshaped by it, so a graph that was traced with one T is right for every other. And no size is
read from a tensor: a trace would compute it in the graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

HIDDEN_BY_MASK = -1e4
"""Added to a score whose slot may not be seen; finite in float16, and as good as -inf there."""


class Step(NamedTuple):
    """What a call says about its T rows besides their hidden states."""

    cos: Tensor
    """[T, r]: rotary cosines of the rows' positions; r is half of the dimensions that turn."""
    sin: Tensor
    """[T, r]"""
    mask: Tensor
    """[1, 1, T, S]: 0 where a row sees a slot, HIDDEN_BY_MASK elsewhere."""
    write: Tensor
    """[1, 1, S, T]: 1 where a row's key and value go, each row to one slot."""
    window_write: Tensor | None = None
    """[1, 1, R, T]: 1 where a row goes in the ring of recent rows (see `Window`)."""
    window_read: Tensor | None = None
    """[1, lags, T, R]: for lag j + 1 the place in the ring of the row so far before; all 0 before
    the text's first."""


def projection(weight: Tensor, bias: Tensor | None = None) -> nn.Conv2d:
    """A matrix [out, in] as a convolution of one pixel: [1, in, T, 1] -> [1, out, T, 1]."""
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], 1, bias=bias is not None)
    conv.weight = nn.Parameter(weight[:, :, None, None].contiguous(), requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    return conv


class RMSNorm(nn.Module):
    """x / rms(x) * weight over an axis, without a number that float16 cannot hold.

    Squares of hidden states overflow: a first token has numbers of 20,000 and more. So they are
    divided by the largest of them before, and what stands under the root is at most 1 + eps. A row
    of small numbers is divided by no less than 1/64, as eps must be divided, too.
    """

    def __init__(self, weight: Tensor, eps: float, axis: int = 1) -> None:
        """`weight` [n] for an axis of n channels; the axes after it broadcast."""
        super().__init__()
        after = 4 - (axis % 4) - 1
        self.weight = nn.Parameter(weight.view(-1, *[1] * after), requires_grad=False)
        # Scaled, as 1e-6 is no normal number of float16. The bound as a tensor, as a number divided
        # by a tensor is converted to an inverse that adds 1e-4 to it.
        self._eps = nn.Parameter(torch.tensor([[[[eps / _LEAST**2]]]]), requires_grad=False)
        self._least = nn.Parameter(torch.tensor([[[[_LEAST]]]]), requires_grad=False)
        self._axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Of four axes, to the same."""
        largest = x.abs().amax(self._axis, keepdim=True).clamp(_LEAST, _MOST)
        y = x / largest
        small = self._least / largest
        root = torch.rsqrt((y * y).mean(self._axis, keepdim=True) + self._eps * small * small)
        return y * root * self.weight


_LEAST = 2.0**-6
_MOST = 65504.0
"""The largest number of float16; an open end would be converted to inf."""


def turn(x: Tensor, step: Step, size: int, turned: int | None = None) -> Tensor:
    """RoPE by halves: [1, heads, size, T], whose first `turned` (2 r; None: all) turn."""
    cos, sin = step.cos.transpose(0, 1), step.sin.transpose(0, 1)
    turned = size if turned is None else turned
    r = turned // 2
    left, right = x[:, :, :r], x[:, :, r:turned]
    parts = [left * cos - right * sin, right * cos + left * sin]
    if turned < size:
        parts.append(x[:, :, turned:])
    return torch.cat(parts, dim=2)


class Attention(nn.Module):
    """Attention over slots that are only ever appended to.

    Keys and values go to the slots that `Step.write` names; what stands in slots that the mask
    hides does not matter, so a rejected row needs no undoing: the next block writes over it.

    Query heads are taken in the order of `grouped`, so that keys and values can be laid out once
    for each group, as a tile.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, slots: int, scale: float | None = None
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        self.register_buffer("k_state", torch.zeros(1, kv_heads, slots, head_dim))
        self.register_buffer("v_state", torch.zeros(1, kv_heads, slots, head_dim))
        self.k_state: Tensor
        self.v_state: Tensor

    def by_head(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads * head_dim, T, 1] -> [1, heads, head_dim, T], of each as many as it has."""
        return (
            q.reshape(1, self.heads, self.head_dim, -1),
            k.reshape(1, self.kv_heads, self.head_dim, -1),
            v.reshape(1, self.kv_heads, self.head_dim, -1),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Q [1, heads, head_dim, T], k and v [1, kv_heads, head_dim, T], turned already.

        Returns [1, heads * head_dim, T, 1].
        """
        # A new tensor is assigned whole: on the Neural Engine states that are written in part fail.
        kept = 1 - step.write.sum(-1, keepdim=True)
        self.k_state[:] = self.k_state * kept + step.write @ k.transpose(2, 3)
        self.v_state[:] = self.v_state * kept + step.write @ v.transpose(2, 3)
        groups = self.heads // self.kv_heads
        keys, values = self.k_state, self.v_state
        if groups > 1:
            keys, values = keys.repeat(1, groups, 1, 1), values.repeat(1, groups, 1, 1)
        scores = (q * self._scale).transpose(2, 3) @ keys.transpose(2, 3) + step.mask
        seen = scores.softmax(-1) @ values  # [1, heads, T, head_dim]
        # [head, dim, token] before the heads become channels: [head, token, dim] is as good with
        # one row and wrong with more.
        return seen.transpose(2, 3).reshape(1, self.heads * self.head_dim, -1, 1)


def grouped(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """The order of query channels that `Attention` wants: the first head of every group first.

    `q_weight[order]` and `o_weight[:, order]`, once, when a model is loaded.
    """
    order = torch.arange(heads * head_dim).view(kv_heads, heads // kv_heads, head_dim)
    return order.transpose(0, 1).reshape(-1)


class Window(nn.Module):
    """The last rows of something, for convolutions over time: a ring that needs no undoing, either.

    A row stands in the ring at its position modulo R. With R of at least a block's rows and the
    longest lag together, a block never overwrites what the rows after a kept one look back to.
    """

    def __init__(self, channels: int, ring: int) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(1, 1, ring, channels))
        self.ring: Tensor

    def forward(self, x: Tensor, step: Step, lags: int) -> Sequence[Tensor]:
        """X [1, channels, T, 1]; what it was 1, 2, ... `lags` rows before, each of x's shape."""
        assert step.window_write is not None
        assert step.window_read is not None
        rows = x.permute(0, 3, 2, 1)  # [1, 1, T, channels]
        kept = 1 - step.window_write.sum(-1, keepdim=True)
        self.ring[:] = self.ring * kept + step.window_write @ rows
        return [
            (step.window_read[:, lag : lag + 1] @ self.ring).permute(0, 3, 2, 1)
            for lag in range(lags)
        ]


class GatedFeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Matrices [ff, d], [ff, d], [d, ff]."""
        super().__init__()
        self.gate, self.up, self.down = projection(gate), projection(up), projection(down)

    def forward(self, x: Tensor) -> Tensor:
        """[1, d, T, 1] -> [1, d, T, 1]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out
