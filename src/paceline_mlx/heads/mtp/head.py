"""A head's shape and weights, in one structure for both formats.

A head reads the target's hidden state after token i and the embedding of token i + 1, and predicts
token i + 2. There are two formats: `eagle3` (a separate checkpoint) and `qwen3_5` (tensors inside
the target). Both have one decoder layer, but combine its inputs differently; see `HeadWeights`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_mlx.heads.config import HeadConfig
from paceline_mlx.heads.weights import LayerWeights, Matrix
from paceline_mlx.hooks import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainConfig(HeadConfig):
    rotary_dims: int
    """Leading dimensions of each attention head that RoPE rotates."""
    draft_vocab_size: int | None = None
    """Rows of the head's own output matrix; None: the target's head."""
    own: bool = False
    """True if it is part of its target (`qwen3_5`), not a separate checkpoint (`eagle3`)."""
    head_norms: bool = False
    """True if an `eagle3` head normalizes queries and keys (DeepSpec)."""


class HeadWeights(NamedTuple):
    """The weights of a head; norms are stored as the factors that multiply.

    For a row with hidden state h and embedding e:

    - fused = `fuse` h (`eagle3`), or rms(h) * `fuse` (`qwen3_5`: the target's final norm);
      a drafted row takes the previous row's `carried` instead
    - both = [rms(e) * `embedding_norm`, rms(fused) * `hidden_norm`]
    - `eagle3`: stream = fused, input of attention = both;
      `qwen3_5`: stream = `join` both, input of attention = rms(stream) * its norm
    - the rest of the layer is an ordinary decoder layer
    - logits = `head` (rms(stream) * `norm`)
    - carried = stream (`eagle3`), or rms(stream) * `norm` (`qwen3_5`)
    """

    fuse: Any
    """A matrix [d, taps * d], or a norm [d]."""
    embedding_norm: Array
    hidden_norm: Array
    layer: LayerWeights
    norm: Array
    join: Matrix | None = None
    """[d, 2 * d]"""
    head: Matrix | None = None
    """[draft vocabulary, d]; None: the target's."""
    draft_vocab: npt.NDArray[np.int64] | None = None
    """[draft vocabulary] ascending: the token of each row of `head`."""
