"""ZAYA1's router: which expert a row has, or none, and what the next layer's router hears of it.

Knows probabilities and picks. Knows no experts. The rule: the balancing biases, which kept experts
equally busy in training, decide the pick only; an expert's weight is its plain probability.
"""

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from paceline.tools.coreml.decoder import linear
from paceline.tools.coreml.experts import top_k_mask
from paceline.tools.coreml.layers import RMSNorm

Routing = Literal["top-1", "soft"]
"""The one picked expert, by its probability; or all of them, each by its own."""


class Router(nn.Module):
    """A small network over a state that goes from layer to layer.

    Its last class is none of the experts: a row that picks it passes by (0 is added), and in soft
    routing that class's share is not given to the others.
    """

    def __init__(self, weights: Mapping[str, Tensor], eps: float, routing: Routing) -> None:
        super().__init__()
        self.down = linear(weights, "down_proj", bias=True)
        # The first layer has no router before it.
        scale = weights.get("router_states_scale")
        self.carry = None
        if scale is not None:
            self.carry = nn.Parameter(scale.view(1, -1, 1, 1), requires_grad=False)
        self.norm = RMSNorm(weights["router_mlp.norm.weight"], eps)
        self.first = linear(weights, "router_mlp.fc1", bias=True)
        self.second = linear(weights, "router_mlp.fc2", bias=True)
        self.out = linear(weights, "router_mlp.out_proj")
        biases = weights["balancing_biases"].view(1, -1, 1, 1)
        self.biases = nn.Parameter(biases, requires_grad=False)
        self._experts, self._routing = biases.shape[1] - 1, routing

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """X [1, d, T, 1] and the state of the layer before [1, router_hidden_size, T, 1].

        Returns the experts' weights [1, experts, T, 1], and the state for the next layer.
        """
        new = self.down(x)
        if self.carry is not None:
            new = new + state * self.carry
        inner = F.gelu(self.second(F.gelu(self.first(self.norm(new)))))
        shares = self.out(inner).softmax(1)
        if self._routing == "soft":
            return shares[:, : self._experts], new
        picked = top_k_mask(shares + self.biases, 1)
        return (shares * picked)[:, : self._experts], new
