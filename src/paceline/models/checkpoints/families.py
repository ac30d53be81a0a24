"""The model families whose checkpoints become GGUF files: one row of `FAMILIES` each.

A row says what sets the family apart from a plain decoder (norms before attention and feed-forward,
SwiGLU, no biases). Keys and values are those of llama.cpp's converter (convert_hf_to_gguf.py),
because GGUF is what its reader expects.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.errors import ModelError
from paceline.models.checkpoints import mixed_layers
from paceline.models.checkpoints.model import (
    FOUR_NORMS,
    MOST_EXPERTS,
    POST_NORMS,
    QK_NORMS,
    Config,
    Experts,
    Family,
    Value,
)
from paceline.models.gguf.support import instead_of

GELU = ("gelu_pytorch_tanh", "gelu")
"""Gemma's old configurations say gelu and mean its approximation by tanh."""


def family_of(config: Config) -> Family:
    """The row of `config`'s family, whose defaults are put into `config`.

    Raises ModelError for another family, or for a form of it that readers of GGUF do not know.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"{config.path}: the family {config.model_type} cannot be converted; expected one of "
            f"{', '.join(sorted(FAMILIES))}. {instead_of(config.model_type)}"
        )
    config.values = {**family.defaults, **config.values}
    for name, values in {**family.only, "is_causal": (True, None)}.items():
        if config.get(name) not in values:
            expected = " or ".join(str(value) for value in values if value is not None)
            raise config.wrong(name, config.get(name), f"{expected or 'none'} ({family.arch})")
    activation = config.get("hidden_activation", config.get("hidden_act", family.activation[0]))
    if activation not in family.activation:
        raise config.wrong("hidden_act", activation, family.activation[0])
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    if quantized is not None and not (method == "mxfp4" and config.model_type == "gpt_oss"):
        raise config.wrong(
            "quantization_config", method, "a checkpoint in bf16, f16 or f32, before quantization"
        )
    return family


def _every(period: int) -> Callable[[int], bool]:
    """All layers but every `period`-th have a window."""
    return lambda layer: (layer + 1) % period != 0


def _gemma_window(config: Config, layer: int) -> bool:
    return _every(config.integer("sliding_window_pattern", default=6))(layer)


def _exaone_window(config: Config, layer: int) -> bool:
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # LLLG: three local layers, then a global one
        return pattern[layer % len(pattern)] == "L"
    return _every(config.integer("sliding_window_pattern", default=4))(layer)


def _all_layers(_config: Config, _layer: int) -> bool:
    return True


def _qwen_window(config: Config, layer: int) -> bool:
    """Qwen's window begins at a layer, and is off unless the configuration turns it on."""
    first = config.integer("max_window_layers", default=0, least=0)
    return config.flag("use_sliding_window", default=False) and layer >= first


def _gemma2_metadata(config: Config) -> dict[str, Value]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **{key: config.number(key) for key in caps if config.get(key) is not None},
        **_query_scale(config),
    }


def _gemma3_metadata(config: Config) -> dict[str, Value]:
    key = "final_logit_softcapping"
    return {**({key: config.number(key)} if config.get(key) else {}), **_query_scale(config)}


def _query_scale(config: Config) -> dict[str, Value]:
    """Scale of attention's scores, if it is not head_dim ** -0.5."""
    head = config.integer("head_dim")
    scalar = config.number("query_pre_attn_scalar", default=head)
    return {} if scalar == head else {"attention.scale": scalar**-0.5}


def _minicpm_metadata(config: Config) -> dict[str, Value]:
    depth = config.number("scale_depth") / config.integer("num_hidden_layers") ** 0.5
    return {
        "embedding_scale": config.number("scale_emb"),
        "residual_scale": depth,
        "logit_scale": config.integer("hidden_size") / config.integer("dim_model_base"),
    }


def _smollm3_metadata(config: Config) -> dict[str, Value]:
    """No keys. Raises ModelError unless every fourth layer has no positions, as readers assume."""
    layers = config.integer("num_hidden_layers")
    rotated = [int((layer + 1) % 4 != 0) for layer in range(layers)]
    if config.get("no_rope_layers", rotated) != rotated:
        raise config.wrong("no_rope_layers", config.get("no_rope_layers"), "every fourth layer 0")
    return {}


def _qwen3_experts(config: Config) -> Experts:
    return Experts(
        count=config.integer("num_experts", "num_local_experts", most=MOST_EXPERTS),
        used=config.integer("num_experts_per_tok"),
        ff=config.integer("moe_intermediate_size"),
    )


def _olmoe_experts(config: Config) -> Experts:
    return Experts(
        count=config.integer("num_experts", "num_local_experts", most=MOST_EXPERTS),
        used=config.integer("num_experts_per_tok"),
        ff=config.integer("intermediate_size"),
    )


def _gpt_oss_experts(config: Config) -> Experts:
    return Experts(
        count=config.integer("num_local_experts", "num_experts", most=MOST_EXPERTS),
        used=config.integer("num_experts_per_tok", "experts_per_token"),
        ff=config.integer("intermediate_size"),
        router="mlp.router",
        interleaved=True,
    )


def _glm4_experts(config: Config) -> Experts:
    ff = config.integer("moe_intermediate_size")
    return Experts(
        count=config.integer("n_routed_experts", "num_local_experts", most=MOST_EXPERTS),
        used=config.integer("num_experts_per_tok"),
        ff=ff,
        dense_layers=config.integer("first_k_dense_replace", default=1, least=0),
        shared_ff=ff * config.integer("n_shared_experts", default=1),
        score_bias="mlp.gate.e_score_correction_bias",
    )


def _glm4_metadata(config: Config) -> dict[str, Value]:
    return {
        "expert_shared_count": config.integer("n_shared_experts", default=1),
        "leading_dense_block_count": config.integer("first_k_dense_replace", default=1, least=0),
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_scale": config.number("routed_scaling_factor", default=1.0),
        "expert_weights_norm": config.flag("norm_topk_prob", default=True),
    }


def _norm_topk(*, default: bool) -> Callable[[Config], dict[str, Value]]:
    return lambda config: {"expert_weights_norm": config.flag("norm_topk_prob", default=default)}


_GEMMA3_SIZES = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
    **{"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 4096},
}
_NO_MLP_BIAS = {"mlp_bias": (False, None)}

_GEMMA = Family(
    arch="gemma",
    norm_shift=1.0,
    activation=GELU,
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256},
)
_GEMMA3 = Family(
    arch="gemma3",
    norm_shift=1.0,
    activation=GELU,
    norms=FOUR_NORMS,
    qk_norms=QK_NORMS,
    rope_theta=1_000_000.0,
    rope_theta_sliding=10_000.0,
    window=_gemma_window,
    window_implied=_every(6),
    metadata=_gemma3_metadata,
    defaults={**_GEMMA3_SIZES, "tie_word_embeddings": True},
    only={"attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)},
)
_GEMMA4 = Family(
    arch="gemma4",
    activation=GELU,
    norms=FOUR_NORMS,
    qk_norms=QK_NORMS,
    rope_theta=1_000_000.0,
    rope_theta_sliding=10_000.0,
    window=_gemma_window,
    layers=mixed_layers.gemma4_layers,
    extra=mixed_layers.gemma4_extra,
    metadata=mixed_layers.gemma4_metadata,
    defaults=mixed_layers.GEMMA4_DEFAULTS,
    only={"enable_moe_block": (False, None), "use_bidirectional_attention": (None, "vision")},
)

_LFM2 = Family(
    arch="lfm2",
    rope_theta=1_000_000.0,
    norms=("operator_norm", "ffn_norm"),
    last_norm="model.embedding_norm",
    qk_norms=("q_layernorm", "k_layernorm"),
    output="out_proj",
    feed_forward=("feed_forward.", "w1", "w3", "w2"),
    layers=mixed_layers.lfm2_layers,
    recurrent=mixed_layers.lfm2_recurrent,
    metadata=mixed_layers.lfm2_metadata,
    defaults={"norm_eps": 1e-5, "tie_word_embeddings": True},
    only={"conv_bias": (False, None)},
)
_LFM2_MOE = replace(
    _LFM2,
    arch="lfm2moe",
    experts=mixed_layers.lfm2_experts,
    metadata=mixed_layers.lfm2_moe_metadata,
    only={**_LFM2.only, "norm_topk_prob": (True, None), "routed_scaling_factor": (1.0, None)},
)
_QWEN35 = Family(
    arch="qwen35",
    norm_shift=1.0,
    partial_rotary=0.25,
    qk_norms=QK_NORMS,
    gated=True,
    has_mtp=True,
    layers=mixed_layers.qwen35_layers,
    recurrent=mixed_layers.qwen35_recurrent,
    metadata=mixed_layers.qwen35_metadata,
    defaults={"head_dim": 256, "rms_norm_eps": 1e-6},
    only={"attn_output_gate": (True, None), "attention_bias": (False, None)},
)
_QWEN35_MOE = replace(
    _QWEN35,
    arch="qwen35moe",
    has_mtp=False,
    experts=mixed_layers.qwen35_experts,
    metadata=mixed_layers.qwen35_moe_metadata,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(arch="llama", rope_pairs=True, only=_NO_MLP_BIAS),
    "mistral": Family(arch="llama", rope_pairs=True, window=_all_layers),
    "ministral3": Family(
        arch="mistral3", rope_pairs=True, window=_all_layers, rope_theta=1_000_000.0
    ),
    "qwen2": Family(arch="qwen2", biases="qkv", attention_bias=True, window=_qwen_window),
    "qwen3": Family(arch="qwen3", qk_norms=QK_NORMS, window=_qwen_window),
    "qwen3_moe": Family(
        arch="qwen3moe",
        qk_norms=QK_NORMS,
        window=_qwen_window,
        experts=_qwen3_experts,
        metadata=_norm_topk(default=False),
        only={"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)},
    ),
    "gemma": _GEMMA,
    "gemma2": Family(
        arch="gemma2",
        norm_shift=1.0,
        activation=GELU,
        norms=FOUR_NORMS,
        window=lambda _config, layer: _every(2)(layer),
        window_implied=_every(2),
        metadata=_gemma2_metadata,
        defaults={
            **{"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256},
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            **{"query_pre_attn_scalar": 256, "sliding_window": 4096},
        },
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "phi3": Family(arch="phi3", fused=True, window=_all_layers),
    "smollm3": Family(
        arch="smollm3",
        rope_pairs=True,
        rope_theta=2_000_000.0,
        metadata=_smollm3_metadata,
        only={**_NO_MLP_BIAS, "use_sliding_window": (False, None)},
    ),
    "hunyuan_v1_dense": Family(
        arch="hunyuan-dense", qk_norms=("query_layernorm", "key_layernorm"), only=_NO_MLP_BIAS
    ),
    "olmoe": Family(
        arch="olmoe",
        qk_norms=QK_NORMS,
        qk_norm_whole=True,
        experts=_olmoe_experts,
        metadata=_norm_topk(default=False),
        only={"clip_qkv": (None,)},
    ),
    "gpt_oss": Family(
        arch="gpt-oss",
        attention_bias=True,
        rope_theta=150_000.0,
        window=lambda _config, layer: _every(2)(layer),
        window_implied=_every(2),
        has_sinks=True,
        experts=_gpt_oss_experts,
        only={"swiglu_limit": (7.0, None), "swiglu_alpha": (1.702, None)},
    ),
    "glm4_moe": Family(
        arch="glm4moe",
        partial_rotary=0.5,
        biases="qkv",
        qk_norms=QK_NORMS,
        has_qk_norms=lambda config: config.flag("use_qk_norm", default=False),
        experts=_glm4_experts,
        metadata=_glm4_metadata,
        only={"n_group": (1, None), "topk_group": (1, None)},
    ),
    "exaone4": Family(arch="exaone4", norms=POST_NORMS, qk_norms=QK_NORMS, window=_exaone_window),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2_MOE,
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "minicpm": Family(arch="minicpm", rope_pairs=True, metadata=_minicpm_metadata),
}
"""model_type of a config.json -> its family."""
