"""Building blocks of all families in the Neural Engine's layout, [1, channels, T, 1].

They are projections as 1x1 convolutions, norms that are safe in float16, RoPE, attention with a KV
cache, and convolution states.

Invariant: T is only ever the length of an axis, and no size is read from a tensor, because a trace
would compute it in the graph. So a graph traced with one T is correct for every other T.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class LayerInputs(NamedTuple):
    """The inputs of a forward pass of T rows, besides the hidden states."""

    cos: Tensor
    """[T, r]: rotary cosines for the rows' positions; r is half of the rotary dimensions."""
    sin: Tensor
    """[T, r]"""
    mask: Tensor
    """[1, 1, T, S]: 0 where a row attends to a slot, else `engine.inputs.HIDDEN`."""
    write: Tensor
    """[1, 1, S, T]: 1 where a row's key and value are stored; one slot per row."""
    window_write: Tensor | None = None
    """[1, 1, R, T]: 1 where the row is stored in the ring buffer (see `ConvState`)."""
    window_read: Tensor | None = None
    """[1, lags, T, R]: at j, 1 where the ring buffer has the row j + 1 positions before; all 0
    before the start of the text."""


def write_state(module: nn.Module, name: str, value: Tensor) -> None:
    """Write a whole state: in place if it is a buffer, else as a new tensor."""
    if name in module._buffers:
        getattr(module, name)[:] = value
    else:
        setattr(module, name, value)


def projection(weight: Tensor, bias: Tensor | None = None) -> nn.Conv2d:
    """Return a matrix [out, in] as a 1x1 convolution: [1, in, T, 1] -> [1, out, T, 1]."""
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], 1, bias=bias is not None)
    conv.weight = nn.Parameter(weight[:, :, None, None].contiguous(), requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    return conv


class RMSNorm(nn.Module):
    """An RMS norm, x / rms(x) * weight over an axis, with all intermediates in float16's range.

    Squares of hidden states overflow: a first token's hidden states exceed 20,000. So the row is
    first divided by its largest magnitude, and the radicand is at most 1 + eps. The divisor is at
    least 1/64, because eps is also divided.
    """

    def __init__(self, weight: Tensor, eps: float, axis: int = 1) -> None:
        """Store `weight` [n], for an axis with n channels; it broadcasts over later axes."""
        super().__init__()
        after = 4 - (axis % 4) - 1
        self.weight = nn.Parameter(weight.view(-1, *[1] * after), requires_grad=False)
        # Scaled, because 1e-6 is subnormal in float16. The bound is a tensor, because the converter
        # turns a number divided by a tensor into an inverse that adds 1e-4.
        self._eps = nn.Parameter(torch.tensor([[[[eps / _MIN_DIVISOR**2]]]]), requires_grad=False)
        self._min = nn.Parameter(torch.tensor([[[[_MIN_DIVISOR]]]]), requires_grad=False)
        self._axis = axis

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(self._axis, keepdim=True).clamp(_MIN_DIVISOR, _MAX)
        y = x / largest
        small = self._min / largest
        root = torch.rsqrt((y * y).mean(self._axis, keepdim=True) + self._eps * small * small)
        return y * root * self.weight


_MIN_DIVISOR = 2.0**-6
_MAX = 65504.0
"""The largest float16; without an upper bound, the converter writes inf."""


def apply_rope(x: Tensor, inputs: LayerInputs, size: int, rotary_dim: int | None = None) -> Tensor:
    """Rotate the first `rotary_dim` channels (2 r; None: all) of [1, heads, size, T], by halves."""
    cos, sin = inputs.cos.transpose(0, 1), inputs.sin.transpose(0, 1)
    rotary_dim = size if rotary_dim is None else rotary_dim
    r = rotary_dim // 2
    left, right = x[:, :, :r], x[:, :, r:rotary_dim]
    parts = [left * cos - right * sin, right * cos + left * sin]
    if rotary_dim < size:
        parts.append(x[:, :, rotary_dim:])
    return torch.cat(parts, dim=2)


class Attention(nn.Module):
    """An attention over a KV cache with `slots` positions.

    Keys and values go to the slots in `LayerInputs.write`. Masked slots may have any contents, so a
    rejected row needs no rollback: the next block overwrites it.

    Query heads are in `query_order`, so that keys and values are tiled once for all groups.
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
        """Split each [1, its heads * head_dim, T, 1] into [1, its heads, head_dim, T]."""
        return (
            q.reshape(1, self.heads, self.head_dim, -1),
            k.reshape(1, self.kv_heads, self.head_dim, -1),
            v.reshape(1, self.kv_heads, self.head_dim, -1),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs) -> Tensor:
        """Attend with q [1, heads, head_dim, T], k and v [1, kv_heads, head_dim, T], after RoPE.

        Returns [1, heads * head_dim, T, 1].
        """
        # Assign the whole state: partial writes to a state fail on the Neural Engine.
        kept = 1 - inputs.write.sum(-1, keepdim=True)
        write_state(self, "k_state", self.k_state * kept + inputs.write @ k.transpose(2, 3))
        write_state(self, "v_state", self.v_state * kept + inputs.write @ v.transpose(2, 3))
        groups = self.heads // self.kv_heads
        keys, values = self.k_state, self.v_state
        if groups > 1:
            keys, values = keys.repeat(1, groups, 1, 1), values.repeat(1, groups, 1, 1)
        scores = (q * self._scale).transpose(2, 3) @ keys.transpose(2, 3) + inputs.mask
        mixed = scores.softmax(-1) @ values  # [1, heads, T, head_dim]
        # [head, dim, token] before heads become channels. [head, token, dim] would be correct for
        # one row and wrong for more.
        return mixed.transpose(2, 3).reshape(1, self.heads * self.head_dim, -1, 1)


def query_order(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Return the order of query channels for `Attention`: first the first head of every group.

    Apply `q_weight[order]` and `o_weight[:, order]` once, when loading a model.
    """
    order = torch.arange(heads * head_dim).view(kv_heads, heads // kv_heads, head_dim)
    return order.transpose(0, 1).reshape(-1)


class ConvState(nn.Module):
    """A ring buffer of a tensor's last R rows, for convolutions over time.

    Each row is at its position modulo R. If R is at least a block's rows plus the longest lag, a
    block never overwrites a row that later rows read, so a rejected row needs no rollback.
    """

    def __init__(self, channels: int, conv_slots: int) -> None:
        super().__init__()
        self.register_buffer("conv_state", torch.zeros(1, 1, conv_slots, channels))
        self.conv_state: Tensor

    def forward(self, x: Tensor, inputs: LayerInputs, lags: int) -> Sequence[Tensor]:
        """Store x [1, channels, T, 1]; return x at 1, 2, ... `lags` rows before, in x's shape."""
        assert inputs.window_write is not None
        assert inputs.window_read is not None
        rows = x.permute(0, 3, 2, 1)  # [1, 1, T, channels]
        kept = 1 - inputs.window_write.sum(-1, keepdim=True)
        write_state(self, "conv_state", self.conv_state * kept + inputs.window_write @ rows)
        return [
            (inputs.window_read[:, lag : lag + 1] @ self.conv_state).permute(0, 3, 2, 1)
            for lag in range(lags)
        ]


class GatedFeedForward(nn.Module):
    """A SwiGLU network: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Read matrices [ff, d], [ff, d], [d, ff]."""
        super().__init__()
        self.gate, self.up, self.down = projection(gate), projection(up), projection(down)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out
