"""What a head is: its shape, and its weights in one order for both forms.

A head reads the target's hidden state after token i and the embedding of token i + 1, and predicts
token i + 2. Two forms are known: `eagle3` (a checkpoint of its own) and `qwen3_5` (tensors inside
the target). Both have one decoder layer and differ in what is fused where; `HeadWeights` says how.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline_mlx.hooks import Array


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape of a head."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dims: int
    """Leading dimensions of a head that RoPE rotates."""
    vocab_size: int
    """Tokens of the target."""
    rms_norm_eps: float
    rope_theta: float
    taps: tuple[int, ...]
    """Layers of the target, from 0, after which hidden states are tapped."""
    num_target_layers: int | None = None
    """Layers of the target; None: not in the checkpoint."""
    draft_vocab_size: int | None = None
    """Rows of the head's own output matrix; None: the target's head."""
    own: bool = False
    """Whether it is part of its target (`qwen3_5`), not a checkpoint of its own (`eagle3`)."""
    head_norms: bool = False
    """Whether an `eagle3` head has norms of queries and keys (DeepSpec)."""

    @property
    def tapped_size(self) -> int:
        """Width of what it reads of a token: all taps concatenated."""
        return len(self.taps) * self.hidden_size


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Weights of a head, [out, in] or [width]; norms as they are multiplied.

    A row of hidden state h and embedding e:

    - fused = `fuse` h (`eagle3`), or rms(h) * `fuse` (`qwen3_5`: the target's final norm);
      a drafted row takes the `carried` of the row before instead
    - both = [rms(e) * `embedding_norm`, rms(fused) * `hidden_norm`]
    - `eagle3`: stream = fused, input of attention = both;
      `qwen3_5`: stream = `join` both, input of attention = rms(stream) * `attention_norm`
    - stream += `output` attention; stream += swiglu(rms(stream) * `post_norm`)
    - logits = `head` (rms(stream) * `norm`)
    - carried = stream (`eagle3`), or rms(stream) * `norm` (`qwen3_5`)
    """

    fuse: Any
    """[d, taps * d] or [d]"""
    embedding_norm: Any
    hidden_norm: Any
    query: Any
    """[heads * head_dim, width of attention's input]"""
    keys_values: Any
    """[2 * kv_heads * head_dim, width of attention's input], keys first"""
    output: Any
    """[d, heads * head_dim]"""
    post_norm: Any
    gate_up: Any
    """[2 * intermediate, d], gate first"""
    down: Any
    norm: Any
    join: Any = None
    """[d, 2 * d]"""
    attention_norm: Any = None
    attention_gate: Any = None
    """[heads * head_dim, width]: attention's output is multiplied by its sigmoid."""
    query_norm: Any = None
    """[head_dim]"""
    key_norm: Any = None
    """[head_dim]"""
    head: Any = None
    """[draft vocabulary, d]; None: the target's."""


class Head(NamedTuple):
    """A head as read from its files."""

    path: Path
    config: HeadConfig
    weights: HeadWeights
    draft_vocab: npt.NDArray[np.int64] | None
    """[draft vocabulary] ascending: the tokens of the rows of its own output matrix."""


def cut_vocabulary(head: Head, tokens: int) -> npt.NDArray[np.int64]:
    """The first `tokens` token ids, [n]: in a BPE vocabulary these are the most frequent.

    Raises ModelError if the head has a vocabulary of its own.
    """
    if head.config.draft_vocab_size is not None:
        raise ModelError(
            f"{head.path} drafts {head.config.draft_vocab_size} tokens with an output matrix of "
            "its own; leave vocab out, which is for heads that use the target's"
        )
    return np.arange(min(tokens, head.config.vocab_size), dtype=np.int64)


def layer_weights(of: Callable[..., Array], heads: int | None = None) -> Mapping[str, Any]:
    """The weights that every form calls the same.

    Args:
        of: concatenates the tensors with these names, as Hugging Face calls them.
        heads: attention heads, if each head's query rows are followed by as many rows of its gate.
    """
    query = of("self_attn.q_proj")
    gate = None
    if heads is not None:
        pairs = query.reshape(heads, 2, -1, query.shape[1])
        query, gate = (pairs[:, part].reshape(-1, query.shape[1]) for part in (0, 1))
    return {
        "query": query,
        "attention_gate": gate,
        "keys_values": of("self_attn.k_proj", "self_attn.v_proj"),
        "output": of("self_attn.o_proj"),
        "post_norm": of("post_attention_layernorm"),
        "gate_up": of("mlp.gate_proj", "mlp.up_proj"),
        "down": of("mlp.down_proj"),
    }
