"""What a converter knows of a model: its config.json, its family, and the sizes of both.

A family is its differences from a plain decoder: norms before attention and feed-forward, SwiGLU,
full attention and no biases.

Invariant: a value of config.json that is missing, impossible or of another type is a ModelError
that names its key, whatever version of transformers wrote it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ModelError
from paceline.models.checkpoints.tensors import Form, Output
from paceline.storage.files import read_json

_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST = 2**31 - 1
"""GGUF's integers have 32 bits."""
_MOST_LAYERS = MOST_EXPERTS = 4096
"""Bounds for numbers that cannot be checked before they are used."""

Value = int | float | bool | str | list[int] | list[bool]
"""A value of GGUF's metadata."""

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
FOUR_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
QK_NORMS = ("q_norm", "k_norm")

MakeOutput = Callable[[str, tuple[int, ...], Form], Output]
"""Makes an output of a tensor that is stored as it is: its name in the checkpoint, its shape."""


class Config:
    """The text model's part of a config.json."""

    def __init__(self, path: Path) -> None:
        """Read `path`. Raises ModelError if it is unreadable or names no model_type."""
        whole = read_json(path)
        inner = whole.get("text_config")
        self.path = path
        self.has_other_modalities = isinstance(inner, dict)
        """Whether the checkpoint holds encoders of images or sound beside the text model."""
        self.values: Mapping[str, Any] = {**whole, **inner} if isinstance(inner, dict) else whole
        self.model_type = self.text("model_type")

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`; null counts as missing."""
        value = self.values.get(name)
        return default if value is None else value

    def integer(
        self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST
    ) -> int:
        """The first of `names` that is there, an integer from `least` to `most`."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of `names` that is there, a positive number."""
        name, value = self._first(names, default)
        return positive(self, name, value)

    def text(self, name: str) -> str:
        """The value of `name`, a string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """The value of `name`, true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def layer_types(self, layers: int) -> list[bool] | None:
        """Whether each layer's attention has a sliding window; None without `layer_types`."""
        types = self.get("layer_types")
        if types is None:
            return None
        kinds = (_SLIDING, _FULL)
        is_list = isinstance(types, list) and len(types) == layers
        if not is_list or any(kind not in kinds for kind in types):
            raise self.wrong("layer_types", types, f"{layers} times {_FULL} or {_SLIDING}")
        return [kind == _SLIDING for kind in types]

    def wrong(self, name: str, value: object, expected: str) -> ModelError:
        """The error for a value that cannot be used."""
        shown = "is missing" if value is None else f"is {str(value)[:80]}"
        return ModelError(f"{self.path}: {name} {shown}; expected {expected}")

    def _first(self, names: Sequence[str], default: float | None) -> tuple[str, Any]:
        key = next((name for name in names if self.get(name) is not None), names[0])
        return key, self.get(key, default)


class Rope:
    """Rotary positions of one kind of layer, in the words of transformers 5."""

    def __init__(self, config: Config, values: Mapping[str, Any], theta: float) -> None:
        self._config = config
        self._values = values
        self.kind = str(values.get("rope_type") or values.get("type") or "default").lower()
        self.theta = self.number("rope_theta", default=theta)

    def number(self, name: str, default: float | None = None) -> float:
        """The value of `name`, a positive number."""
        value = self._values.get(name)
        return positive(
            self._config, f"rope_parameters.{name}", default if value is None else value
        )

    def numbers(self, name: str, count: int) -> list[float]:
        """The value of `name`, a list of `count` positive numbers."""
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self._config.wrong(f"rope_parameters.{name}", values, f"{count} numbers")
        return [positive(self._config, f"rope_parameters.{name}", value) for value in values]

    def has(self, name: str) -> bool:
        """Whether the configuration says `name`."""
        return self._values.get(name) is not None


def read_ropes(
    config: Config, theta: float = 10_000.0, theta_sliding: float = 0
) -> tuple[Rope, Rope]:
    """Rotary positions of the layers with full attention, and of those with a sliding window.

    Args:
        config: its rope_parameters (transformers 5), or rope_theta, rope_scaling and
            rope_local_base_freq (before).
        theta: the family's base, if the configuration has none.
        theta_sliding: that of the layers with a window; 0: the same as the others.
    """
    # Next to rope_scaling, transformers 4 kept these at the top of config.json.
    tops = ("original_max_position_embeddings", "partial_rotary_factor")
    top = {name: config.get(name) for name in tops if config.get(name) is not None}
    parameters = _mapping(config, "rope_parameters") or _mapping(config, "rope_scaling")
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full, sliding = (parameters.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
        if not isinstance(full, dict) or not isinstance(sliding, dict):
            raise config.wrong(
                "rope_parameters", parameters, "an object for each kind of attention"
            )
        return Rope(config, {**top, **full}, theta), Rope(config, sliding, theta_sliding or theta)
    full = Rope(config, {**top, **parameters}, config.number("rope_theta", default=theta))
    local = config.get("rope_local_base_freq")
    if local is None and not theta_sliding:
        return full, full
    return full, Rope(config, {"rope_theta": local}, theta_sliding or theta)


def _mapping(config: Config, name: str) -> Mapping[str, Any]:
    mapping = config.get(name, {})
    if not isinstance(mapping, dict):
        raise config.wrong(name, mapping, "an object")
    return mapping


def positive(config: Config, name: str, value: object) -> float:
    """`value` as a float. Raises ModelError, which names `name`, for anything but a number > 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise config.wrong(name, value, "a positive number")
    return float(value)


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


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model."""

    vocab: int
    hidden: int
    heads: int
    context: int
    window: int
    """Tokens; 0: no layer has one."""
    rotary: int
    """Values of a head that are rotated."""
    layers: tuple[Layer, ...]
    experts: Experts | None
    attention_bias: bool
    qk_norm: bool
    rope: Rope
    rope_sliding: Rope
    """Of the layers with a window."""


def read_sizes(config: Config, family: Family) -> Sizes:
    """Sizes of the model. Raises ModelError for missing or impossible values."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if config.get("head_dim") is None and hidden % heads:
        raise config.wrong("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")
    head_dim = config.integer("head_dim", default=hidden // heads)
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    rope, rope_sliding = read_ropes(config, family.rope_theta, family.rope_theta_sliding)
    context = config.integer("max_position_embeddings")
    count = config.integer("num_hidden_layers", most=_MOST_LAYERS)
    windows = _windows(config, family, count, context)
    experts = family.experts(config)
    ff = config.integer("intermediate_size", "block_ff_dim", "moe_intermediate_size")
    plain = Layer(head_dim, kv_heads, ff, has_window=False, has_experts=False)
    layers = [
        plain._replace(
            has_window=windows[layer],
            has_experts=experts is not None and layer >= experts.dense_layers,
        )
        for layer in range(count)
    ]
    if family.layers is not None:
        layers = family.layers(config, layers)
    partial = rope.number("partial_rotary_factor", default=family.partial_rotary)
    return Sizes(
        vocab=config.integer("vocab_size"),
        hidden=hidden,
        heads=heads,
        context=context,
        window=config.integer("sliding_window") if any(windows) else 0,
        rotary=int(head_dim * partial),
        layers=tuple(layers),
        experts=experts,
        attention_bias=config.flag("attention_bias", default=family.attention_bias),
        qk_norm=family.qk_norms is not None and family.has_qk_norms(config),
        rope=rope,
        rope_sliding=rope_sliding,
    )


def _windows(config: Config, family: Family, layers: int, context: int) -> list[bool]:
    """Whether each layer has a window. One as large as the context counts as none."""
    size = config.get("sliding_window")
    if size is None or config.integer("sliding_window") >= context:
        return [False] * layers
    if family.window is None:
        return config.layer_types(layers) or [False] * layers
    types = config.layer_types(layers)
    return types if types is not None else [family.window(config, i) for i in range(layers)]
