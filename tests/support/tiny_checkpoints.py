"""Random tiny Hugging Face checkpoints of each family, and the GGUF files made of them.

No torch and no transformers: transformers can read what is written here, and tests marked
`reference` compare with it. Every weight has an effect, and no two rows of logits are alike.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.models.checkpoints.convert import plan, write
from paceline.models.checkpoints.families import family_of
from paceline.models.checkpoints.layout import layout
from paceline.models.checkpoints.model import Config, read_sizes
from support.tiny import tokenizer_fields, vocabulary

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _heads(queries: int, keys: int, size: int) -> dict[str, int]:
    """Heads of queries, those of keys and values, and the size of one.

    Each form has the size and the ratio of a published model, and one head of keys where that
    has one.
    """
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": size}


def _whole(queries: int, keys: int, size: int) -> dict[str, Any]:
    """Heads that divide the model's width, as they must where a configuration has no head_dim."""
    return {**_heads(queries, keys, size), "head_dim": None, "hidden_size": queries * size}


_GEMMA: dict[str, Any] = {
    **{**_SIZES, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    **{"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 16},
}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "original_max_position_embeddings": 128},
}
_LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128},
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [2.0 + i / 3 for i in range(48)],
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_QWEN35 = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        **{"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
}
_GPT_OSS: dict[str, Any] = {
    **{**_SIZES, **_heads(16, 2, 64)},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    **{"attention_bias": True, "rope_parameters": {**_YARN, "rope_theta": 150000.0}},
}
_LFM2: dict[str, Any] = {
    **{**_SIZES, "num_hidden_layers": 4, "norm_eps": 1e-5, "rms_norm_eps": None},
    **{"hidden_act": None, "conv_L_cache": 3, "tie_word_embeddings": True, "conv_bias": False},
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}


def _sliding(pattern: str) -> list[str]:
    return [{"L": "sliding_attention", "G": "full_attention"}[letter] for letter in pattern]


def _gemma_rope(full: dict[str, Any]) -> dict[str, Any]:
    """Positions of layers with and without a window."""
    return {
        "full_attention": {**full, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


FORMS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, **_heads(16, 2, 64), "model_type": "llama"},
    "llama-mqa": {**_SIZES, **_heads(8, 1, 64), "model_type": "llama"},
    "llama-100": {**_SIZES, **_heads(2, 2, 100), "model_type": "llama"},
    "llama3": {**_SIZES, **_heads(8, 2, 64), "model_type": "llama", "rope_parameters": _LLAMA3},
    "llama-linear": {
        **{**_SIZES, **_heads(2, 2, 128), "model_type": "llama", "vocab_size": 337},
        "rope_parameters": _LINEAR,
    },
    "mistral": {**_SIZES, **_heads(8, 2, 80), "model_type": "mistral", "sliding_window": 16},
    "ministral3": {
        **{**_SIZES, **_heads(8, 2, 128), "model_type": "ministral3"},
        "rope_parameters": {
            **{**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {
        **{**_SIZES, **_heads(14, 2, 64), "model_type": "qwen2", "tie_word_embeddings": True}
    },
    "qwen3": {
        **{**_SIZES, **_heads(4, 2, 128), "model_type": "qwen3", "tie_word_embeddings": True}
    },
    "qwen3-yarn": {
        **{**_SIZES, **_heads(8, 2, 128), "model_type": "qwen3", "rope_parameters": _YARN}
    },
    "qwen3_moe": {
        **{**_SIZES, **_heads(16, 2, 128), **_MOE, "model_type": "qwen3_moe"},
        "moe_intermediate_size": 64,
    },
    "gemma": {**_GEMMA, **_heads(8, 1, 256), "model_type": "gemma"},
    "gemma2": {
        **{**_GEMMA, **_heads(4, 2, 256), "model_type": "gemma2"},
        **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    },
    "gemma3_text": {
        **{**_GEMMA, **_heads(4, 1, 256), "model_type": "gemma3_text", "num_hidden_layers": 7},
        **{"vocab_size": 321, "layer_types": _sliding("LLLLLGL")},
        "rope_parameters": _gemma_rope({"rope_type": "default"}),
    },
    "gemma3_text-linear": {
        **{**_GEMMA, **_heads(4, 2, 256), "model_type": "gemma3_text", "num_hidden_layers": 7},
        "layer_types": _sliding("LLLLLGL"),
        "rope_parameters": _gemma_rope({"rope_type": "linear", "factor": 8.0}),
    },
    "gemma4_text": {
        **{**_GEMMA, **_heads(8, 1, 256), "model_type": "gemma4_text", "num_hidden_layers": 6},
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320},
        **{"global_head_dim": 512, "num_kv_shared_layers": 2, "final_logit_softcapping": 3.0},
        "layer_types": _sliding("LLGLLG"),
        "rope_parameters": _gemma_rope(
            {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        ),
    },
    "gemma4_text-k-is-v": {
        **{**_GEMMA, **_heads(8, 4, 256), "model_type": "gemma4_text"},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 512},
        **{"hidden_size_per_layer_input": 0, "layer_types": _sliding("LG")},
        "rope_parameters": _gemma_rope(
            {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        ),
    },
    "phi3": {
        **{**_SIZES, **_whole(2, 2, 96), "model_type": "phi3", "sliding_window": None},
        "vocab_size": 341,
    },
    "phi3-longrope": {
        **{**_SIZES, **_whole(3, 1, 128), "model_type": "phi3", "tie_word_embeddings": True},
        **{"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128},
    },
    "smollm3": {
        **{**_SIZES, **_heads(8, 2, 128), "model_type": "smollm3", "num_hidden_layers": 4},
        **{"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
        **{"use_sliding_window": False, "tie_word_embeddings": True},
    },
    "hunyuan_v1_dense": {
        **{**_SIZES, **_heads(8, 2, 128), "model_type": "hunyuan_v1_dense", "vocab_size": 327},
        "rope_parameters": {
            **{"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
        },
    },
    "olmoe": {
        **{**_SIZES, **_whole(2, 2, 128), **_MOE, "model_type": "olmoe"},
        **{"norm_topk_prob": False, "clip_qkv": None, "intermediate_size": 64},
    },
    "gpt_oss": {**_GPT_OSS, "model_type": "gpt_oss"},
    "gpt_oss-mxfp4": {
        **{**_GPT_OSS, "model_type": "gpt_oss"},
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "glm4_moe": {
        **{**_SIZES, **_heads(12, 1, 128), "model_type": "glm4_moe", "num_hidden_layers": 3},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
        **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, "norm_topk_prob": True},
        **{"routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1, "attention_bias": True},
        "use_qk_norm": True,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        },
    },
    "exaone4": {
        **{**_SIZES, **_heads(8, 2, 64), "model_type": "exaone4"},
        **{"sliding_window": None, "layer_types": None},
    },
    "exaone4-window": {
        **{**_SIZES, **_heads(10, 2, 128), "model_type": "exaone4", "num_hidden_layers": 4},
        **{"sliding_window": 16, "sliding_window_pattern": "LLLG"},
        **{"layer_types": _sliding("LLLG"), "rope_parameters": _LLAMA3},
    },
    "lfm2": {
        **{**_LFM2, **_whole(4, 2, 64), "model_type": "lfm2", "block_multiple_of": 32},
        **{"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
    },
    "lfm2_moe": {
        **{**_LFM2, **_whole(4, 1, 64), **_MOE, "model_type": "lfm2_moe", "vocab_size": 323},
        **{"moe_intermediate_size": 64, "num_dense_layers": 1, "use_expert_bias": True},
        "routed_scaling_factor": 1.0,
    },
    "qwen3_5_text": {
        **{**_SIZES, **_heads(8, 2, 256), **_QWEN35},
        **{"model_type": "qwen3_5_text", "num_hidden_layers": 4},
    },
    "qwen3_5_moe_text": {
        **{**_SIZES, **_heads(16, 2, 256), **_MOE, **_QWEN35},
        **{"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4},
        **{"intermediate_size": None, "moe_intermediate_size": 64},
        "shared_expert_intermediate_size": 96,
    },
    "minicpm": {
        **{**_SIZES, **_whole(2, 2, 64), "model_type": "minicpm", "rope_theta": 10000.0},
        **{"vocab_size": 321, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64},
    },
}
"""Name -> config.json; a name is its model_type, and what is special after a dash."""


def write_checkpoint(
    form: str, folder: Path, seed: int = 0, *, dtype: str = "F32", **config: Any
) -> Path:
    """Write config.json, tokenizer.json and model.safetensors; return `folder`.

    Args:
        form: a key of `FORMS`.
        folder: made if it is not there.
        seed: of the weights.
        dtype: F32, F16 or BF16.
        config: replaces values of config.json; a value of None leaves it out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**FORMS[form], **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    write_tokenizer(folder / "tokenizer.json", values["vocab_size"])
    read = Config(folder / "config.json")
    family = family_of(read)
    outputs = layout(read, family, read_sizes(read, family), _Names(form))
    rng = np.random.default_rng(seed)
    tensors = {
        name: small_values(rng, name, shape, family.norm_shift)
        for output in outputs
        for name, shape in output.sources.items()
    }
    if family.arch == "gemma4":  # its scores are not divided; trained norms keep them small
        norms = {name: rows for name, rows in tensors.items() if name.endswith("q_norm.weight")}
        tensors |= {name: rows / rows.size**0.5 for name, rows in norms.items()}
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    return folder


def write_gguf_of(
    form: str,
    path: Path,
    seed: int = 0,
    *,
    weights: str = "f32",
    fields: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write the GGUF file of a tiny checkpoint, with the tokenizer of tiny models; return `path`.

    `fields` replaces metadata; `weights` is a key of `convert.WEIGHTS`. The checkpoint stays beside
    the file, as `<stem>-checkpoint`.
    """
    folder = write_checkpoint(form, path.with_name(f"{path.stem}-checkpoint"), seed, **config)
    checkpoint = plan(folder, weights)
    count = {**FORMS[form], **config}["vocab_size"]
    about = {**checkpoint.fields, **tokenizer_fields(checkpoint.arch, count), **(fields or {})}
    write(dataclasses.replace(checkpoint, fields=about), path, lambda _done: None)
    return path


class _Names:
    """Names that decide the form of a checkpoint: a head; MXFP4, or experts one by one or not."""

    def __init__(self, form: str) -> None:
        self._ends: tuple[str, ...] = ()
        if form.endswith("-mxfp4"):
            self._ends = ("_blocks",)
        elif form.startswith("qwen3_5_moe"):  # as published
            self._ends = ("experts.gate_up_proj",)

    def __contains__(self, name: object) -> bool:
        return name == "lm_head.weight" or str(name).endswith(self._ends)


def small_values(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], shift: float
) -> np.ndarray:
    if name.endswith("_blocks"):
        return rng.integers(0, 256, shape, dtype=np.uint8)
    if name.endswith("_scales"):  # exponents of two, about 1/8 to 1/16
        return rng.integers(123, 125, shape, dtype=np.uint8)
    if name.endswith("linear_attn.norm.weight"):
        shift = 0.0
    low, high = next((bounds for end, bounds in _UNIFORM.items() if name.endswith(end)), (0, 0))
    if low < high:
        return rng.uniform(low, high, shape)
    if name.endswith("norm.weight") or "norm_" in name:
        return rng.normal(1 - shift, 0.1, shape)
    if name.endswith(("bias", "sinks")):
        return rng.normal(0, 0.2, shape)
    return rng.normal(0, 1.5 * shape[-1] ** -0.5, shape)


_UNIFORM = {"layer_scalar": (0.8, 1.2), "A_log": (-4, -0.5)}
"""Ends of names -> bounds. A_log: a state keeps about 0.6 to 0.99 of itself from row to row."""


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """Write floats as `dtype`; bytes, whole numbers and truth values stay what they are."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, values in tensors.items():
        kind = _KEPT.get(values.dtype.name, dtype)
        rows = values if kind != dtype else stored(values, dtype)
        ends = [len(data), len(data) + rows.nbytes]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": ends}
        data += np.ascontiguousarray(rows).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


_KEPT = {"uint8": "U8", "int64": "I64", "bool": "BOOL"}
_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Floats as they lie in a file; bfloat16 is the upper two bytes of a float32."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(_FLOATS[dtype])


def write_tokenizer(path: Path, count: int = 320) -> None:
    """Write the tokenizer of tiny models, of `count` tokens, as a tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types, merges = vocabulary(count)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i]) for i, kind in enumerate(types) if kind == 3]
    )
    tokenizer.save(str(path))
