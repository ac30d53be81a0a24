"""Qwen3.5 (text): most layers have linear attention, a gated delta rule after a short convolution.

Its heads of values are stored by the head of keys that they share; GGUF has those of equal rank
side by side, so that readers repeat the keys as a whole.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from paceline.models.to_gguf.config import Config
from paceline.models.to_gguf.family import MOST_EXPERTS, Experts, Layer, Value
from paceline.models.to_gguf.outputs import Form, Order, Output, rearranged, whole

_LINEAR, _FULL = "linear_attention", "full_attention"
_INTERVAL = 4
_SECTIONS = [11, 11, 10]


class _Sizes(NamedTuple):
    """Of linear attention."""

    keys: int
    """Heads."""
    values: int
    key_size: int
    value_size: int
    kernel: int


def layers(config: Config, plain: list[Layer]) -> list[Layer]:
    """Sizes of each layer; every fourth has full attention, or as often as is said."""
    interval = _interval(config)
    implied = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(len(plain))]
    if config.get("layer_types", implied) != implied:
        expected = f"every {interval}th layer {_FULL}, the others {_LINEAR}"
        raise config.wrong("layer_types", config.get("layer_types"), expected)
    return [
        layer._replace(has_attention=kind == _FULL)
        for layer, kind in zip(plain, implied, strict=True)
    ]


def metadata(config: Config) -> dict[str, Value]:
    """Keys of qwen35 alone."""
    sizes = _sizes(config)
    rope = config.get("rope_parameters", config.get("rope_scaling", {}))
    sections = rope.get("mrope_section", _SECTIONS) if isinstance(rope, dict) else _SECTIONS
    if not isinstance(sections, list) or not all(isinstance(each, int) for each in sections):
        raise config.wrong("mrope_section", sections, "a list of integers")
    return {
        "full_attention_interval": _interval(config),
        "rope.dimension_sections": [*sections, 0, 0, 0, 0][:4],
        "ssm.conv_kernel": sizes.kernel,
        "ssm.state_size": sizes.key_size,
        "ssm.group_count": sizes.keys,
        "ssm.time_step_rank": sizes.values,
        "ssm.inner_size": sizes.values * sizes.value_size,
    }


def moe_metadata(config: Config) -> dict[str, Value]:
    """Keys of qwen35moe alone."""
    return {
        **metadata(config),
        "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
    }


def experts(config: Config) -> Experts:
    """Sizes of the experts."""
    return Experts(
        count=config.integer("num_experts", most=MOST_EXPERTS),
        used=config.integer("num_experts_per_tok"),
        ff=config.integer("moe_intermediate_size"),
        shared_ff=config.integer("shared_expert_intermediate_size"),
        shared="mlp.shared_expert.",
        shared_gate="mlp.shared_expert_gate",
    )


def recurrent(config: Config, prefix: str, name: Callable[[str], str]) -> Iterator[Output]:
    """Tensors of the layer `prefix`, which has linear attention."""
    hidden, sizes = config.integer("hidden_size"), _sizes(config)
    prefix += "linear_attn."
    heads = _side_by_side(sizes, 1)
    values = _side_by_side(sizes, sizes.value_size)
    keys = np.arange(2 * sizes.keys * sizes.key_size, dtype=np.int64)
    mixed = np.concatenate([keys, len(keys) + values])
    for part, order, form in (
        ("in_proj_qkv", mixed, Form.MATRIX),
        ("in_proj_z", values, Form.MATRIX),
        # Small, and what a state keeps depends on them.
        ("in_proj_a", heads, Form.TABLE),
        ("in_proj_b", heads, Form.TABLE),
    ):
        source = f"{prefix}{part}.weight"
        yield whole(name(source), source, (len(order), hidden), form, order=order)
    source, shape = f"{prefix}out_proj.weight", (hidden, len(values))
    yield rearranged(name(source), source, (shape, shape), lambda rows: rows[:, values].copy())
    source = f"{prefix}conv1d.weight"
    shapes = (len(mixed), 1, sizes.kernel), (len(mixed), sizes.kernel)
    yield rearranged(name(source), source, shapes, lambda weights: weights[mixed, 0])
    single = (len(heads),)
    target = name(f"{prefix}dt_proj.bias")
    yield whole(target, f"{prefix}dt_bias", single, Form.PLAIN, order=heads)
    source = f"{prefix}A_log"
    target = name(source).removesuffix(".weight")
    yield rearranged(target, source, (single, single), lambda logs: -np.exp(logs[heads]))
    source = f"{prefix}norm.weight"
    yield whole(name(source), source, (sizes.value_size,), Form.PLAIN)


def _side_by_side(sizes: _Sizes, width: int) -> Order:
    """Order of rows of the heads of values, `width` rows each."""
    rows = np.arange(sizes.values * width, dtype=np.int64)
    return rows.reshape(sizes.keys, -1, width).swapaxes(0, 1).reshape(-1)


def _interval(config: Config) -> int:
    """Every how many layers one has full attention: as said, or as the first of them."""
    said = config.get("layer_types")
    first = said.index(_FULL) + 1 if isinstance(said, list) and _FULL in said else _INTERVAL
    return config.integer("full_attention_interval", default=first)


def _sizes(config: Config) -> _Sizes:
    sizes = _Sizes(
        config.integer("linear_num_key_heads", default=16),
        config.integer("linear_num_value_heads", default=32),
        config.integer("linear_key_head_dim", default=128),
        config.integer("linear_value_head_dim", default=128),
        config.integer("linear_conv_kernel_dim", default=4, most=64),
    )
    if sizes.values % sizes.keys:
        name = "linear_num_value_heads"
        raise config.wrong(name, sizes.values, f"a multiple of {sizes.keys} heads of keys")
    if sizes.value_size != sizes.key_size:
        name = "linear_value_head_dim"
        raise config.wrong(name, sizes.value_size, f"linear_key_head_dim, {sizes.key_size}")
    return sizes
