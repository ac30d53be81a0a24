"""What a family of models says of itself, so that a converter need not know which one it is.

A family reads a checkpoint and gives its layers, one at a time: a large model is never whole in
memory. Hidden states go from layer to layer as a *stream*, [1, stream_size, T, 1]; its first
`hidden_size` channels are the token's embedding at the start. Most families need no more; one that
carries something else along (a second residual, a router's state) appends channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

Floats = npt.NDArray[np.float32]

Kind = Literal["causal-lm", "token-classification"]
"""A token classifier reads whole texts: its layers have no states, and its rows see others on both
sides, `mask` being [1, 1, T, T]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that a converter and a runtime need."""

    family: str
    """As in `config.json`: `model_type`."""
    layers: int
    hidden_size: int
    vocab_size: int
    stream_size: int
    """Channels that go from layer to layer."""
    lags: int = 0
    """How many rows a layer looks back to besides attention; 0 without windows."""
    kind: Kind = "causal-lm"
    reach: int = 0
    """Of a token classifier: how far a row sees, in both directions."""
    labels: tuple[str, ...] = ()
    """What a token classifier says of a token, one of them."""


class Tables(NamedTuple):
    """Rotary cosines and sines, [positions, r] float32, with the family's factor in them."""

    cos: Floats
    sin: Floats


class Family(Protocol):
    """One model of a family, opened from a checkpoint.

    `config` is what transformers reads from the folder's config.json, `weights` maps the names of
    the checkpoint's tensors to them, as float32. `slots` is the most positions a sequence has,
    `ring` the places of a window (see `layers.Window`).
    """

    shape: Shape

    def __init__(self, config: Any, weights: Mapping[str, Tensor], *, slots: int, ring: int): ...

    def layer(self, index: int) -> nn.Module:
        """Layer `index`: forward(stream, step) -> stream. Made anew at every call.

        Its states are buffers, zero at first.
        """
        ...

    def embeddings(self) -> Tensor:
        """[vocab, hidden_size]: what the stream begins with, scaled if the family scales it."""
        ...

    def final(self) -> nn.Module:
        """What stands between the last layer and the head: stream -> [1, hidden_size, T, 1].

        A token classifier's has the head in it: [1, labels, T, 1].
        """
        ...

    def head(self) -> Tensor | None:
        """[vocab, hidden_size]; a token classifier has none."""
        ...

    def tables(self) -> Tables:
        """Rotary tables for `slots` positions."""
        ...
