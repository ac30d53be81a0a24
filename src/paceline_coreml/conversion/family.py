"""A model family: everything about an architecture that the converter needs.

A family reads a checkpoint and builds its layers one at a time, so memory never holds a whole large
model. The *stream* is the tensor between layers, [1, stream_size, T, 1]; its first `hidden_size`
channels are the hidden state. A family with more state between layers (a second residual, a
router's state) appends channels.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from paceline_coreml.conversion.checkpoint import Prefixed
from paceline_coreml.conversion.layers import RMSNorm
from paceline_coreml.engine.artifact import Drafts, Task

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, for the converter and the runtime."""

    family: str
    """The config's `model_type`."""
    layers: int
    hidden_size: int
    vocab_size: int
    stream_size: int
    """Channels of the stream."""
    lags: int = 0
    """Previous rows that a convolution reads; 0 without convolutions."""
    task: Task = "causal-lm"
    """For "draft", half of the rows are the drafter's block; see `families/dflash.py`.

    A token classifier gets whole texts: its layers have no states, its attention is bidirectional,
    and its `mask` is [1, 1, T, T]."""
    window: int = 0
    """For a classifier: tokens that attention reaches on either side."""
    labels: tuple[str, ...] = ()
    """A token classifier's labels."""
    input_size: int = 0
    """Input channels of the first layer; 0: `stream_size`."""
    drafts: Drafts | None = None
    """For a drafter: the target's taps and sizes."""


def rotary_of(config: Any) -> Any:
    """Return transformers' rotary embedding for a config."""
    kind = config.model_type
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    (embedding,) = (one for name, one in vars(module).items() if name.endswith("RotaryEmbedding"))
    return embedding(config)


def make_rope_tables(embedding: Any, positions: int) -> Floats:
    """Compute the tables of a transformers rotary embedding, [2, positions, r].

    They are cosines and sines times `attention_scaling`, for the frequencies `inv_freq` [r]. Angles
    are computed in float64, because float32 is off by 1e-4 at positions above 2,000.
    """
    frequencies = embedding.inv_freq.double().numpy()
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    factor = float(embedding.attention_scaling)
    return (np.stack([np.cos(angles), np.sin(angles)]) * factor).astype(np.float32)


class Family:
    """A model of one family, read from a checkpoint with the tensor names that decoders share."""

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        *,
        slots: int,
        layer: Callable[[int, Mapping[str, Tensor]], nn.Module],
        rotary: Any,
        norm: str = "model.norm.weight",
        eps: float,
        lags: int = 0,
    ) -> None:
        """Store everything needed to build layers.

        `config` and `rotary` (the rotary embedding) are transformers'. `layer` builds a layer from
        its index and its own tensors. `norm` and `eps` are those of the final norm.
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

    def with_weights(self, weights: Mapping[str, Tensor]) -> Self:
        """Return a copy that reads other tensors of the same names and shapes."""
        other = copy(self)
        other._weights = weights
        return other

    def layer(self, index: int) -> nn.Module:
        """Create a module of layer `index`: forward(stream, inputs) -> stream.

        Its states are buffers, initially zero.
        """
        return self._layer(index, Prefixed(self._weights, f"model.layers.{index}."))

    def embeddings(self) -> Tensor:
        """Return the embeddings [vocab, hidden_size], with the family's scaling applied."""
        return self._weights["model.embed_tokens.weight"]

    def final(self) -> nn.Module:
        """Create the modules between last layer and head: stream -> [1, hidden_size, T, 1].

        A token classifier's modules include the head: stream -> [1, labels, T, 1].
        """
        return RMSNorm(self._weights[self._norm], self._eps)

    def head(self) -> Tensor | None:
        """Return the head's weights [vocab, hidden_size], or None for a token classifier."""
        return self.embeddings() if self._tied else self._weights["lm_head.weight"]

    def rope_tables(self) -> Floats:
        """Compute rotary cosines and sines for `slots` positions, [2, slots, r]."""
        return make_rope_tables(self._rotary, self._slots)
