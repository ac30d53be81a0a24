"""EAGLE-3's head once more, in plain numpy and float64, and how vLLM reads its checkpoint.

`reference_logits` is written from the paper (arXiv 2503.01840) and vLLM's `llama_eagle3.py`, row by
row; it shares nothing with the torch network.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.drafters.mtp import HeadConfig

Weights = Mapping[str, np.ndarray]


def random_head(config: HeadConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Norms around 1; matrices that keep the size of what goes through them."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(*((1.0, 0.2) if len(size) == 1 else (0.0, size[-1] ** -0.5)), size)
        for name, size in head_shapes(config).items()
    }


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight that vLLM reads, beside `d2t`."""
    d, ff = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    layer = {
        "input_layernorm": (d,),
        "hidden_norm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (q, 2 * d),
        "self_attn.k_proj": (kv, 2 * d),
        "self_attn.v_proj": (kv, 2 * d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (ff, d),
        "mlp.up_proj": (ff, d),
        "mlp.down_proj": (d, ff),
    }
    return {
        "fc.weight": (d, len(config.taps) * d),
        "norm.weight": (d,),
        "lm_head.weight": (config.draft_vocab_size or config.vocab_size, d),
        **{f"midlayer.{name}.weight": shape for name, shape in layer.items()},
    }


def reference_logits(
    config: HeadConfig, weights: Weights, tapped: np.ndarray, embedded: Sequence[np.ndarray]
) -> np.ndarray:
    """[draft_vocab]: logits of the last row of a chain.

    Args:
        config: shape of the head.
        weights: by name.
        tapped: [n, taps * d], hidden states of the target after the first n tokens.
        embedded: embeddings of the tokens from the second on; more than n: the head's own steps.
    """
    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []
    hidden = np.zeros(config.hidden_size)
    for position, token in enumerate(embedded):
        if position < len(tapped):
            hidden = weights["fc.weight"] @ tapped[position]
        hidden = _layer(config, weights, token, hidden, position, keys, values)
    return weights["lm_head.weight"] @ _rms(config, hidden, weights["norm.weight"])


def _layer(
    config: HeadConfig,
    weights: Weights,
    token: np.ndarray,
    hidden: np.ndarray,
    position: int,
    keys: list[np.ndarray],
    values: list[np.ndarray],
) -> np.ndarray:
    def of(name: str) -> np.ndarray:
        return weights[f"midlayer.{name}.weight"]

    x = np.concatenate(
        [_rms(config, token, of("input_layernorm")), _rms(config, hidden, of("hidden_norm"))]
    )
    hd, shared = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    q = (of("self_attn.q_proj") @ x).reshape(-1, hd)
    keys.append(_rotated((of("self_attn.k_proj") @ x).reshape(-1, hd), position, config))
    values.append((of("self_attn.v_proj") @ x).reshape(-1, hd))
    q = _rotated(q, position, config)
    joined = []
    for head in range(config.num_attention_heads):
        scores = np.array([q[head] @ key[head // shared] for key in keys]) / hd**0.5
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        joined.append(
            sum(share * value[head // shared] for share, value in zip(shares, values, strict=True))
        )
    hidden = hidden + of("self_attn.o_proj") @ np.concatenate(joined)
    normed = _rms(config, hidden, of("post_attention_layernorm"))
    gate = of("mlp.gate_proj") @ normed
    return hidden + of("mlp.down_proj") @ (
        gate / (1 + np.exp(-gate)) * (of("mlp.up_proj") @ normed)
    )


def _rms(config: HeadConfig, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean() + config.rms_norm_eps) * weight


def _rotated(x: np.ndarray, position: int, config: HeadConfig) -> np.ndarray:
    half = config.head_dim // 2
    angle = position / config.rope_theta ** (np.arange(half) / half)
    left, right = x[:, :half], x[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=1)


def read_as_vllm(
    config: Mapping[str, Any], tensors: Mapping[str, Any], target_layers: int
) -> tuple[list[int], list[int]]:
    """The target tokens of the head's rows, and the layers whose inputs vLLM gives the head.

    Follows `Eagle3LlamaForCausalLM` of vLLM: the parameters it makes from the config, and the names
    under which `load_weights` looks for them. Raises AssertionError where vLLM would fail.
    """
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama", "read by transformers' LlamaConfig"
    d, ff, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    layer = "model.layers.0."
    parameters = {
        "model.fc.weight": (d, 3 * d),
        "model.norm.weight": (d,),
        "lm_head.weight": (config["draft_vocab_size"], d),
        "draft_id_to_target_id": (config["draft_vocab_size"],),
        layer + "input_layernorm.weight": (d,),
        layer + "hidden_norm.weight": (d,),
        layer + "post_attention_layernorm.weight": (d,),
        layer + "self_attn.qkv_proj.weight q": (q, 2 * d),
        layer + "self_attn.qkv_proj.weight k": (kv, 2 * d),
        layer + "self_attn.qkv_proj.weight v": (kv, 2 * d),
        layer + "self_attn.o_proj.weight": (d, q),
        layer + "mlp.gate_up_proj.weight 0": (ff, d),
        layer + "mlp.gate_up_proj.weight 1": (ff, d),
        layer + "mlp.down_proj.weight": (d, ff),
    }
    stacked = {
        ".q_proj.weight": ".qkv_proj.weight q",
        ".k_proj.weight": ".qkv_proj.weight k",
        ".v_proj.weight": ".qkv_proj.weight v",
        ".gate_proj.weight": ".gate_up_proj.weight 0",
        ".up_proj.weight": ".gate_up_proj.weight 1",
    }
    for name, tensor in tensors.items():
        if "t2d" in name:
            continue
        if "d2t" in name:
            there = name.replace("d2t", "draft_id_to_target_id")
        else:
            there = name if "lm_head" in name else f"model.{name}"
        there = there.replace("midlayer.", "layers.0.")
        for ours, theirs in stacked.items():
            there = there.replace(ours, theirs)
        assert tuple(tensor.shape) == parameters.pop(there), name
    assert not parameters, "tensors that the checkpoint lacks"
    rows = [row + int(difference) for row, difference in enumerate(tensors["d2t"])]
    layers = [2, target_layers // 2, target_layers - 3]
    return rows, config.get("eagle_aux_hidden_state_layer_ids", layers)
