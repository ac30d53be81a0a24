"""GGUF's metadata of a checkpoint, under the keys that llama.cpp's converter writes."""

from paceline.models.to_gguf.config import Config
from paceline.models.to_gguf.family import Family, Value
from paceline.models.to_gguf.rope import rope_metadata
from paceline.models.to_gguf.sizes import Sizes


def metadata(config: Config, family: Family, sizes: Sizes) -> dict[str, Value]:
    """All keys but the general ones. Raises ModelError for what GGUF has no key for."""
    layers = sizes.layers
    about: dict[str, Value] = {
        "vocab_size": sizes.vocab,
        "context_length": sizes.context,
        "embedding_length": sizes.hidden,
        "block_count": len(layers),
        "feed_forward_length": _one_or_all([layer.ff for layer in layers]),
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": _one_or_all([layer.kv_heads for layer in layers]),
        "attention.key_length": layers[0].head_dim,
        "attention.value_length": layers[0].head_dim,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", "norm_eps"),
        "rope.dimension_count": sizes.rotary,
        **rope_metadata(config, sizes),
        **_windows(family, sizes),
    }
    if sizes.experts is not None:
        about["expert_count"] = sizes.experts.count
        about["expert_used_count"] = sizes.experts.used
        about["expert_feed_forward_length"] = sizes.experts.ff
    about.update(family.metadata(config))
    return {f"{family.arch}.{key}": value for key, value in about.items()}


def _windows(family: Family, sizes: Sizes) -> dict[str, Value]:
    """The window's size; and its layers, where readers would assume others."""
    if family.window is None:
        return {}
    flags = [layer.has_window for layer in sizes.layers]
    if family.window_implied is None:
        return {
            "attention.sliding_window": sizes.window,
            **({"attention.sliding_window_pattern": flags} if sizes.window else {}),
        }
    # Readers put a window there in any case: one of the whole context is none.
    as_implied = flags == [family.window_implied(i) for i in range(len(flags))]
    return {
        "attention.sliding_window": sizes.window or sizes.context,
        **({"attention.sliding_window_pattern": flags} if sizes.window and not as_implied else {}),
    }


def _one_or_all(values: list[int]) -> Value:
    return values[0] if len({*values}) == 1 else values
