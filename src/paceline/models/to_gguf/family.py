"""What a model family is, to a converter: the differences from a plain decoder.

A plain decoder has norms before attention and feed-forward, SwiGLU, full attention and no biases.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.models.to_gguf.config import Config
from paceline.models.to_gguf.outputs import Form, Output

Value = int | float | bool | str | list[int] | list[bool]
"""A value of GGUF's metadata."""

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
FOUR_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
QK_NORMS = ("q_norm", "k_norm")
MOST_EXPERTS = 4096
"""A bound for a number that cannot be checked before it is used."""


MakeOutput = Callable[[str, tuple[int, ...], Form], Output]
"""Makes an output of a tensor that is stored as it is: its name in the checkpoint, its shape."""


class Layer(NamedTuple):
    """Sizes of one layer."""

    head_dim: int
    kv_heads: int
    ff: int
    """Width of the feed-forward network; with experts, that of layers without them."""
    has_window: bool
    has_experts: bool
    kv_of: int | None = None
    """The earlier layer whose keys and values it attends to; None: its own."""
    has_attention: bool = True
    """Whether it has attention; else it has the family's `recurrent` tensors."""
    v_is_k: bool = False
    """Whether the projection of k serves v as well."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Sizes of a mixture of experts."""

    count: int
    used: int
    ff: int
    """Width of one expert."""
    dense_layers: int = 0
    """Layers at the beginning that have none."""
    shared_ff: int = 0
    """Width of the experts that every token takes; 0: there are none."""
    shared: str = "mlp.shared_experts."
    shared_gate: str | None = None
    """Name in a layer of the vector whose product with a token weighs them."""
    router: str = "mlp.gate"
    score_bias: str | None = None
    """Name in a layer of what is added to choose experts."""
    interleaved: bool = False
    """gpt-oss: gate and up are alternate columns of one matrix, [experts, in, out], with biases."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart."""

    arch: str
    """Its name in GGUF."""
    rope_pairs: bool = False
    """Readers of this arch rotate neighbouring values, transformers the halves of a head: the rows
    of q and k are put in that order."""
    rope_theta: float = 10_000.0
    rope_theta_sliding: float = 0
    """Base in layers with a window; 0: the same as in others."""
    partial_rotary: float = 1.0
    norms: tuple[str, ...] = PRE_NORMS
    last_norm: str = "model.norm"
    norm_shift: float = 0.0
    """Added to the weights of norms, which the checkpoint stores less it."""
    qk_norms: tuple[str, str] | None = None
    qk_norm_whole: bool = False
    """Whether q and k are normalized over all heads, not head by head."""
    has_qk_norms: Callable[[Config], bool] = lambda _config: True
    biases: str = "qkvo"
    """Projections of attention that have a bias where the configuration says attention_bias."""
    attention_bias: bool = False
    """Its default."""
    output: str = "o_proj"
    """Name of attention's last projection."""
    gated: bool = False
    """Whether the projection of q has a gate beside each head, as wide as the head."""
    feed_forward: tuple[str, str, str, str] = ("mlp.", "gate_proj", "up_proj", "down_proj")
    """Names of the feed-forward network and of its matrices."""
    recurrent: Callable[[Config, str, Callable[[str], str]], Iterator[Output]] | None = None
    """Tensors of layers without attention: of the layer's name, with a dot, and of a function that
    gives a tensor's name in GGUF."""
    has_mtp: bool = False
    """Whether checkpoints may have an MTP head (`mtp.*`), and GGUF a place for it."""
    fused: bool = False
    """Whether q, k, v are one matrix, and gate and up another."""
    activation: tuple[str, ...] = ("silu", "swish")
    window: Callable[[Config, int], bool] | None = None
    """Whether a layer has a window, where the configuration gives a size but no layer_types; None:
    the family has no windows."""
    window_implied: Callable[[int], bool] | None = None
    """The layers in which readers assume the window; None: they are told layer by layer."""
    experts: Callable[[Config], Experts | None] = lambda _config: None
    has_sinks: bool = False
    """Whether each head of attention has a logit for attending to nothing."""
    layers: Callable[[Config, list[Layer]], list[Layer]] | None = None
    """Sizes where they differ from layer to layer; None: they do not."""
    extra: Callable[[Config, MakeOutput], Iterator[Output]] | None = None
    """Tensors that no other family has."""
    metadata: Callable[[Config], Mapping[str, Value]] = lambda _config: {}
    """Keys, without the arch, that no other family has or that are other than usual."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json that transformers assumes where they are missing."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of config.json that the graph of this arch assumes; others are refused."""
