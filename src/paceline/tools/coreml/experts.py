"""A mixture of experts in shapes that do not depend on the data.

Knows how experts are chosen by scores, and how their outputs are summed. Knows no family's router.
The rule: nothing is sorted, gathered or branched on. No integers come out, and all tensors have at
most four axes.

What it costs: every expert is computed for every row, and then most are multiplied by 0. A model
with 4 of 32 experts active reads and computes 8 times of what it would need to.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from paceline.tools.coreml.layers import projection

MOST_CHANNELS = 16384
"""The longest axis that the Neural Engine takes."""


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """1 for the k highest scores of a row, 0 for others: [1, experts, T, 1] to the same shape.

    An expert is in if fewer than k are better. Of two with the same score the first is better, so
    that there are always k. Compares every expert with every other: [1, experts, experts, T].

    In signs and bounds, not in truth values: those become numbers by a cast, which leaves the
    Neural Engine, or by a choice of two, to which the converter gives a wrong shape.
    """
    experts = int(scores.shape[1])
    # By numpy, so that it is a constant where this is traced. 1 where the other stands before.
    first = torch.from_numpy(2 * np.tri(experts, k=-1)[None, :, :, None] - 1).to(scores.dtype)
    mine, others = scores.permute(0, 1, 3, 2), scores.permute(0, 3, 1, 2)
    better = (2 * (others - mine).sign() + first).clamp(0, 1)
    rank = better.sum(2, keepdim=True)  # [1, experts, 1, T]
    return (k - rank).clamp(0, 1).permute(0, 1, 3, 2)


class Stack(NamedTuple):
    """One matrix of every expert."""

    weight: Tensor
    """[experts, out, in]"""
    bias: Tensor | None = None
    """[experts, out]"""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """What most experts do between their matrices."""
    return F.silu(gate) * up


class Experts(nn.Module):
    """The sum over experts of weight * down(between(gate(x), up(x))).

    The experts of a chunk are one wide feed-forward: their hidden channels are multiplied by the
    routing weights, and `down` then sums over the experts as it sums over channels.
    """

    def __init__(
        self,
        gate: Stack,
        up: Stack,
        down: Stack,
        between: Callable[[Tensor, Tensor], Tensor] = swiglu,
        most_channels: int = MOST_CHANNELS,
    ) -> None:
        """Gate and up [experts, ff, d], down [experts, d, ff]."""
        super().__init__()
        experts, self._size, _ = gate.weight.shape
        chunks = -(-experts // max(1, most_channels // self._size))
        chunk = -(-experts // chunks)
        self._chunks = [slice(at, min(at + chunk, experts)) for at in range(0, experts, chunk)]
        self.gates = nn.ModuleList(_side_by_side(gate, chosen) for chosen in self._chunks)
        self.ups = nn.ModuleList(_side_by_side(up, chosen) for chosen in self._chunks)
        self.downs = nn.ModuleList(_summed(down, chosen) for chosen in self._chunks)
        # Weighted like the rest of what an expert gives: [d, experts] times the routing weights.
        self.down_bias = None if down.bias is None else projection(down.bias.T)
        self._between = between

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """X [1, d, T, 1] and routing weights [1, experts, T, 1] -> [1, d, T, 1]."""
        parts = [] if self.down_bias is None else [self.down_bias(weights)]
        convolutions = zip(self.gates, self.ups, self.downs, strict=True)
        for chosen, (gate, up, down) in zip(self._chunks, convolutions, strict=True):
            count = chosen.stop - chosen.start
            hidden = self._between(gate(x), up(x)).reshape(1, count, self._size, -1)
            hidden = hidden * weights[:, chosen].permute(0, 1, 3, 2)  # [1, count, 1, T]
            parts.append(down(hidden.reshape(1, count * self._size, -1, 1)))
        out: Tensor = sum(parts[1:], parts[0])
        return out


def _side_by_side(stack: Stack, chosen: slice) -> nn.Conv2d:
    """The outputs of some experts one after another: [d] -> [count * ff]."""
    bias = None if stack.bias is None else stack.bias[chosen].flatten()
    return projection(stack.weight[chosen].flatten(0, 1), bias)


def _summed(stack: Stack, chosen: slice) -> nn.Conv2d:
    """The outputs of some experts summed: [count * ff] -> [d]."""
    return projection(stack.weight[chosen].transpose(0, 1).flatten(1))
