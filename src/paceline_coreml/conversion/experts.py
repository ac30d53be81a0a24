"""A mixture of experts whose shapes do not depend on the data.

It picks experts by scores and sums their outputs, for any family's router. Invariant: no sorting,
no gathering, no branches, no integers, and at most four axes.

Cost: every expert runs for every row, and most outputs are then multiplied by 0. With 4 of 32
experts active, this reads and computes 8x as much as necessary.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from paceline_coreml.conversion.layers import projection

MAX_CHANNELS = 16384
"""The longest axis that the Neural Engine supports."""


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """Return 1 for each row's k highest scores, else 0: [1, experts, T, 1] to the same shape.

    An expert is picked if fewer than k experts rank higher. Among equal scores the first ranks
    higher, so exactly k are picked. All pairs of experts are compared: [1, experts, experts, T].

    Signs and clamps replace booleans: a cast of booleans leaves the Neural Engine, and the
    converter gives a select of two numbers a wrong shape.
    """
    experts = int(scores.shape[1])
    # Made with numpy, so that tracing makes it a constant. 1 where the other expert comes first.
    first = torch.from_numpy(2 * np.tri(experts, k=-1)[None, :, :, None] - 1).to(scores.dtype)
    mine, others = scores.permute(0, 1, 3, 2), scores.permute(0, 3, 1, 2)
    better = (2 * (others - mine).sign() + first).clamp(0, 1)
    rank = better.sum(2, keepdim=True)  # [1, experts, 1, T]
    return (k - rank).clamp(0, 1).permute(0, 1, 3, 2)


class Stack(NamedTuple):
    """The stack of one matrix from every expert."""

    weight: Tensor
    """[experts, out, in]"""
    bias: Tensor | None = None
    """[experts, out]"""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Experts(nn.Module):
    """A module that sums weight * down(activation(gate(x), up(x))) over experts.

    The experts of a chunk are one wide feed-forward network. The routing weights multiply its
    hidden channels, so `down` sums over experts and channels at once.
    """

    def __init__(
        self,
        gate: Stack,
        up: Stack,
        down: Stack,
        activation: Callable[[Tensor, Tensor], Tensor] = swiglu,
        max_channels: int = MAX_CHANNELS,
    ) -> None:
        """Split the experts into chunks: gate and up [experts, ff, d], down [experts, d, ff]."""
        super().__init__()
        experts, self._size, _ = gate.weight.shape
        chunks = -(-experts // max(1, max_channels // self._size))
        chunk = -(-experts // chunks)
        self._chunks = [slice(at, min(at + chunk, experts)) for at in range(0, experts, chunk)]
        self.gates = nn.ModuleList(_concatenated(gate, chosen) for chosen in self._chunks)
        self.ups = nn.ModuleList(_concatenated(up, chosen) for chosen in self._chunks)
        self.downs = nn.ModuleList(
            projection(down.weight[chosen].transpose(0, 1).flatten(1)) for chosen in self._chunks
        )
        # The routing weights also multiply each expert's bias, [d, experts].
        self.down_bias = None if down.bias is None else projection(down.bias.T)
        self._activation = activation

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Compute x [1, d, T, 1] and routing weights [1, experts, T, 1] -> [1, d, T, 1]."""
        parts = [] if self.down_bias is None else [self.down_bias(weights)]
        convolutions = zip(self.gates, self.ups, self.downs, strict=True)
        for chosen, (gate, up, down) in zip(self._chunks, convolutions, strict=True):
            count = chosen.stop - chosen.start
            hidden = self._activation(gate(x), up(x)).reshape(1, count, self._size, -1)
            hidden = hidden * weights[:, chosen].permute(0, 1, 3, 2)  # [1, count, 1, T]
            parts.append(down(hidden.reshape(1, count * self._size, -1, 1)))
        out: Tensor = sum(parts[1:], parts[0])
        return out


def _concatenated(stack: Stack, chosen: slice) -> nn.Conv2d:
    """Concatenate the outputs of a chunk's experts: [d] -> [count * ff]."""
    bias = None if stack.bias is None else stack.bias[chosen].flatten()
    return projection(stack.weight[chosen].flatten(0, 1), bias)
