"""ZAYA1's router: picks one expert per row, or none, and passes a state to the next layer's router.

Invariant: the balancing biases, which equalized the experts' load in training, affect only the
pick; an expert's weight is its plain probability.
"""

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from paceline_coreml.conversion.decoder import channels, linear
from paceline_coreml.conversion.experts import top_k_mask
from paceline_coreml.conversion.layers import RMSNorm

Routing = Literal["top-1", "soft"]
"""The most probable expert only, or all experts; both are weighted by probability."""


class ExpertRouter(nn.Module):
    """A small network with a state that each layer passes to the next.

    The last class is "no expert": a row that picks it skips the experts (adds 0). Soft routing does
    not redistribute its probability.
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
