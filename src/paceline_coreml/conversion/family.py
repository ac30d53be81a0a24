"""A model family: everything that the converter needs of an architecture.

A family reads a checkpoint and builds its layers one at a time, so a large model is never whole in
memory. The *stream* is the tensor between layers, [1, stream_size, T, 1]; its first `hidden_size`
channels are the hidden state. A family with more state between layers (a second residual, a
router's state) appends channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from paceline_coreml.conversion.checkpoint import Prefixed
from paceline_coreml.conversion.layers import RMSNorm
from paceline_coreml.engine.artifact import Drafts

Floats = npt.NDArray[np.float32]

Task = Literal["causal-lm", "token-classification", "draft"]
"""Of a drafter's rows half are its block; see `families/dflash.py`.

A token classifier gets whole texts: its layers have no states, its attention is bidirectional,
and its `mask` is [1, 1, T, T]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model for the converter and the runtime."""

    family: str
    """`model_type` of config.json."""
    layers: int
    hidden_size: int
    vocab_size: int
    stream_size: int
    """Channels of the stream."""
    lags: int = 0
    """Previous rows that a convolution reads; 0 without convolutions."""
    task: Task = "causal-lm"
    window: int = 0
    """Tokens that a classifier's attention sees on either side."""
    labels: tuple[str, ...] = ()
    """Labels of a token classifier."""
    input_size: int = 0
    """Channels into the first layer, if they are not `stream_size`."""
    drafts: Drafts | None = None
    """Of a drafter."""


class RopeTables(NamedTuple):
    """Rotary cosines and sines, [positions, r] float32, times the family's attention scaling."""

    cos: Floats
    sin: Floats


def make_rope_tables(embedding: Any, positions: int) -> RopeTables:
    """Tables of a transformers rotary embedding for `positions`.

    `embedding` has `inv_freq` [r] and `attention_scaling`, a factor of cosines and sines. Angles
    are computed in float64: float32 is off by 1e-4 from position 2,000 on.
    """
    frequencies = embedding.inv_freq.double().numpy()
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    factor = float(embedding.attention_scaling)
    return RopeTables((cos * factor).astype(np.float32), (sin * factor).astype(np.float32))


class Family:
    """One model of a family, opened from a checkpoint of the tensor names that decoders share."""

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
        """Keep what the layers are built of.

        Args:
            config: what transformers reads from config.json.
            weights: the checkpoint's tensors by name, in float32.
            slots: KV cache positions, the longest sequence.
            layer: builds a layer from its index and its own tensors.
            rotary: transformers' rotary embedding for the config.
            norm: name of the final norm's weight.
            eps: epsilon of that norm.
            lags: see `Shape`.
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

    def layer(self, index: int) -> nn.Module:
        """A new module of layer `index`: forward(stream, inputs) -> stream.

        Its states are buffers, initially zero.
        """
        return self._layer(index, Prefixed(self._weights, f"model.layers.{index}."))

    def embeddings(self) -> Tensor:
        """[vocab, hidden_size], with the family's scaling of embeddings applied."""
        return self._weights["model.embed_tokens.weight"]

    def final(self) -> nn.Module:
        """Modules between the last layer and the head: stream -> [1, hidden_size, T, 1].

        A token classifier's includes the head: [1, labels, T, 1].
        """
        return RMSNorm(self._weights[self._norm], self._eps)

    def head(self) -> Tensor | None:
        """[vocab, hidden_size]; None for a token classifier."""
        return self.embeddings() if self._tied else self._weights["lm_head.weight"]

    def rope_tables(self) -> RopeTables:
        """Rotary tables for `slots` positions."""
        return make_rope_tables(self._rotary, self._slots)
