"""LFM2 and LFM2-MoE: most layers have a gated short convolution instead of attention."""

from collections.abc import Callable, Iterator

from paceline.models.to_gguf.config import Config
from paceline.models.to_gguf.family import MOST_EXPERTS, Experts, Layer, Value
from paceline.models.to_gguf.outputs import Form, Output, rearranged, whole

_CONV, _ATTENTION = "conv", "full_attention"


def layers(config: Config, plain: list[Layer]) -> list[Layer]:
    """Sizes of each layer. GGUF marks those without attention by 0 heads of keys."""
    found = config.get("layer_types")
    if found is None:
        indices = config.get("full_attn_idxs", list(range(len(plain))))
        is_list = isinstance(indices, list) and all(index in range(len(plain)) for index in indices)
        if not is_list:
            raise config.wrong("full_attn_idxs", indices, "a list of layers")
        found = [_ATTENTION if layer in indices else _CONV for layer in range(len(plain))]
    is_list = isinstance(found, list) and len(found) == len(plain)
    if not is_list or any(kind not in (_CONV, _ATTENTION) for kind in found):
        raise config.wrong("layer_types", found, f"{len(plain)} times {_CONV} or {_ATTENTION}")
    ff = _ff(config)
    return [
        layer._replace(ff=ff)
        if kind == _ATTENTION
        else layer._replace(ff=ff, kv_heads=0, has_attention=False)
        for layer, kind in zip(plain, found, strict=True)
    ]


def metadata(config: Config) -> dict[str, Value]:
    """Keys of lfm2 alone."""
    return {"shortconv.l_cache": _kernel(config)}


def moe_metadata(config: Config) -> dict[str, Value]:
    """Keys of lfm2moe alone."""
    return {
        **metadata(config),
        "leading_dense_block_count": _dense_layers(config),
        "expert_gating_func": 2,  # sigmoid
    }


def experts(config: Config) -> Experts:
    """Sizes of the experts of LFM2-MoE."""
    has_bias = config.flag("use_expert_bias", default=True)
    return Experts(
        count=config.integer("num_experts", most=MOST_EXPERTS),
        used=config.integer("num_experts_per_tok"),
        ff=config.integer("moe_intermediate_size"),
        dense_layers=_dense_layers(config),
        router="feed_forward.gate",
        score_bias="feed_forward.expert_bias" if has_bias else None,
    )


def recurrent(config: Config, prefix: str, name: Callable[[str], str]) -> Iterator[Output]:
    """Tensors of the layer `prefix`, which has a short convolution."""
    hidden, kernel = config.integer("hidden_size"), _kernel(config)
    for part, rows in (("in_proj", 3 * hidden), ("out_proj", hidden)):
        source = f"{prefix}conv.{part}.weight"
        yield whole(name(source), source, (rows, hidden), Form.MATRIX)
    source = f"{prefix}conv.conv.weight"
    shapes = (hidden, 1, kernel), (hidden, kernel)
    yield rearranged(name(source), source, shapes, lambda values: values[:, 0].copy())


def _dense_layers(config: Config) -> int:
    return config.integer("num_dense_layers", default=2, least=0)


def _kernel(config: Config) -> int:
    return config.integer("conv_L_cache", default=3, most=64)


def _ff(config: Config) -> int:
    """Width of the feed-forward network, as transformers' Lfm2MLP makes it of the configuration."""
    ff = config.integer("block_ff_dim", "intermediate_size")
    if config.model_type == "lfm2" and config.flag("block_auto_adjust_ff_dim", default=True):
        multiple = config.integer("block_multiple_of", default=256)
        ff = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * ff / 3))
        ff = multiple * -(-ff // multiple)
    return ff
