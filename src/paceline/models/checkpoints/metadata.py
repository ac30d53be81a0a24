"""GGUF's metadata of a checkpoint, under the keys that llama.cpp's converter writes.

Among it are rotary positions, some of whose scalings need tensors of factors.
"""

import math
from typing import NamedTuple

import numpy as np

from paceline.models.checkpoints.model import Config, Family, Rope, Sizes, Value
from paceline.models.checkpoints.tensors import Floats

_NEVER = 1e30
"""Divides a frequency to nothing: this value of a head is not rotated."""


class Factors(NamedTuple):
    """Divisors of the frequencies, one per pair of values."""

    name: str
    values: Floats
    """[rotary / 2]"""


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
    """Size of the sliding window, and its layers if readers would assume other ones."""
    if family.window is None:
        return {}
    flags = [layer.has_window for layer in sizes.layers]
    if family.window_implied is None:
        return {
            "attention.sliding_window": sizes.window,
            **({"attention.sliding_window_pattern": flags} if sizes.window else {}),
        }
    # Readers always assume a window in these families: the whole context stands for none.
    as_implied = flags == [family.window_implied(i) for i in range(len(flags))]
    return {
        "attention.sliding_window": sizes.window or sizes.context,
        **({"attention.sliding_window_pattern": flags} if sizes.window and not as_implied else {}),
    }


def _one_or_all(values: list[int]) -> Value:
    return values[0] if len({*values}) == 1 else values


def rope_metadata(config: Config, sizes: Sizes) -> dict[str, Value]:
    """Keys for the positions. Raises ModelError for a scaling that GGUF has no form for."""
    rope, sliding = sizes.rope, sizes.rope_sliding
    about: dict[str, Value] = {"rope.freq_base": rope.theta}
    has_windows = any(layer.has_window for layer in sizes.layers)
    if has_windows and sliding.theta != rope.theta:
        about["rope.freq_base_swa"] = sliding.theta
    if has_windows and sliding is not rope and sliding.kind != "default":
        raise config.wrong("rope_type of sliding_attention", sliding.kind, "default")
    scaling: dict[str, Value]
    match rope.kind:
        case (
            "default" | "llama3" | "proportional"
        ):  # the latter two are tensors: see `rope_factors`
            return about
        case "linear":
            scaling = {"type": "linear", "factor": rope.number("factor")}
        case "yarn":
            scaling = _yarn(rope)
        case "longrope" | "su":
            scaling = _longrope(rope, sizes)
        case "dynamic" if rope.has("alpha"):  # hunyuan: a larger base, and no other scaling
            head = sizes.layers[0].head_dim
            about["rope.freq_base"] = rope.theta * rope.number("alpha") ** (head / (head - 2))
            return about
        case _:
            raise config.wrong("rope_type", rope.kind, "default, linear, llama3, yarn or longrope")
    about.update({f"rope.scaling.{key}": value for key, value in scaling.items()})
    if rope.has("llama_4_scaling_beta"):
        about["attention.temperature_scale"] = rope.number("llama_4_scaling_beta")
    return about


def rope_factors(config: Config, sizes: Sizes) -> list[Factors]:
    """Tensors of factors: of llama3, of longrope, and of heads that are rotated in part."""
    rope = sizes.rope
    pairs = sizes.rotary // 2
    match rope.kind:
        case "llama3":
            return [Factors("rope_freqs.weight", _llama3(rope, sizes.rotary))]
        case "longrope" | "su":
            kinds = ("long", "short")
            return [
                Factors(
                    f"rope_factors_{kind}.weight",
                    np.array(rope.numbers(f"{kind}_factor", pairs), np.float32),
                )
                for kind in kinds
            ]
        case "proportional":
            head = max(layer.head_dim for layer in sizes.layers if not layer.has_window)
            turned = int(rope.number("partial_rotary_factor", default=1.0) * head // 2)
            factors = np.full(head // 2, _NEVER, np.float32)
            factors[:turned] = rope.number("factor", default=1.0)
            return [Factors("rope_freqs.weight", factors)]
        case _:
            return []


def _llama3(rope: Rope, rotary: int) -> Floats:
    """Divisors [rotary / 2]: 1 for short waves, `factor` for long ones, and between in between.

    As transformers' _compute_llama3_parameters, of which this is the quotient.
    """
    frequencies = rope.theta ** -(np.arange(0, rotary, 2, dtype=np.float64) / rotary)
    factor, low = rope.number("factor"), rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    waves = rope.number("original_max_position_embeddings") * frequencies / (2 * math.pi)
    smooth = np.clip((waves - low) / (high - low), 0, 1)
    divisors: Floats = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return divisors


def _yarn(rope: Rope) -> dict[str, Value]:
    """Keys under rope.scaling. Readers multiply by 0.1 ln(factor) + 1 unless told otherwise."""
    keys = {
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "mscale_all_dim": "yarn_log_multiplier",
    }
    return {
        "type": "yarn",
        "factor": rope.number("factor"),
        "original_context_length": int(rope.number("original_max_position_embeddings")),
        **{key: rope.number(name) for name, key in keys.items() if rope.has(name)},
    }


def _longrope(rope: Rope, sizes: Sizes) -> dict[str, Value]:
    original = rope.number("original_max_position_embeddings")
    grown = rope.number("factor", default=sizes.context / original)
    factor = math.sqrt(1 + math.log(grown) / math.log(original)) if grown > 1 else 1.0
    return {
        "type": "longrope",
        "original_context_length": int(original),
        "attn_factor": rope.number("attention_factor", default=factor),
    }
