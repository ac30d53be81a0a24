"""Sizes of a model, read once from its configuration and checked against each other."""

from dataclasses import dataclass

from paceline.models.to_gguf.config import Config, Rope, read_ropes
from paceline.models.to_gguf.family import Experts, Family, Layer

_MOST_LAYERS = 4096
"""A bound for a number that cannot be checked before it is used."""


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
    """Of each layer: whether it has a window. One as large as the context is none."""
    size = config.get("sliding_window")
    if size is None or config.integer("sliding_window") >= context:
        return [False] * layers
    if family.window is None:
        return config.layer_types(layers) or [False] * layers
    said = config.layer_types(layers)
    return said if said is not None else [family.window(config, i) for i in range(layers)]
