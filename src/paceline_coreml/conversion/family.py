"""The interface of a model family: everything that the converter needs of an architecture.

A family reads a checkpoint and builds its layers one at a time, so a large model is never whole in
memory. The *stream* is the tensor between layers, [1, stream_size, T, 1]; its first `hidden_size`
channels are the hidden state. A family with more state between layers (a second residual, a
router's state) appends channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

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


class Family(Protocol):
    """One model of a family, opened from a checkpoint.

    `config` is what transformers reads from config.json; `weights` maps the checkpoint's tensor
    names to float32 tensors; `slots` is the number of KV cache positions, the longest sequence;
    `conv_slots` is the number of rows in the ring buffer of a `layers.ConvState`.
    """

    shape: Shape

    def __init__(
        self, config: Any, weights: Mapping[str, Tensor], *, slots: int, conv_slots: int
    ): ...

    def layer(self, index: int) -> nn.Module:
        """A new module of layer `index`: forward(stream, inputs) -> stream.

        Its states are buffers, initially zero.
        """
        ...

    def embeddings(self) -> Tensor:
        """[vocab, hidden_size], with the family's scaling of embeddings applied."""
        ...

    def final(self) -> nn.Module:
        """Modules between the last layer and the head: stream -> [1, hidden_size, T, 1].

        A token classifier's includes the head: [1, labels, T, 1].
        """
        ...

    def head(self) -> Tensor | None:
        """[vocab, hidden_size]; None for a token classifier."""
        ...

    def rope_tables(self) -> RopeTables:
        """Rotary tables for `slots` positions."""
        ...
