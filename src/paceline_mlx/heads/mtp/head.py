"""What a head is: its shape, and its weights in one order for both forms.

A head reads the target's hidden state after token i and the embedding of token i + 1, and predicts
token i + 2. Two forms are known: `eagle3` (a checkpoint of its own) and `qwen3_5` (tensors inside
the target). Both have one decoder layer and differ in what is fused where; `HeadWeights` says how.
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
    """Leading dimensions of a head that RoPE rotates."""
    draft_vocab_size: int | None = None
    """Rows of the head's own output matrix; None: the target's head."""
    own: bool = False
    """Whether it is part of its target (`qwen3_5`), not a checkpoint of its own (`eagle3`)."""
    head_norms: bool = False
    """Whether an `eagle3` head has norms of queries and keys (DeepSpec)."""


class HeadWeights(NamedTuple):
    """Weights of a head; norms as they are multiplied.

    A row of hidden state h and embedding e:

    - fused = `fuse` h (`eagle3`), or rms(h) * `fuse` (`qwen3_5`: the target's final norm);
      a drafted row takes the `carried` of the row before instead
    - both = [rms(e) * `embedding_norm`, rms(fused) * `hidden_norm`]
    - `eagle3`: stream = fused, input of attention = both;
      `qwen3_5`: stream = `join` both, input of attention = rms(stream) * its norm
    - the rest of the layer, as in any decoder
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
    """[draft vocabulary] ascending: the tokens of the rows of `head`."""
