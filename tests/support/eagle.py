"""EAGLE-3's head as it is trained: what it computes, and how vLLM reads its checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.drafters.mtp import HeadConfig
from support.dflash import Ends
from support.mtp import HeadForm, reference_chain, shapes

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
    return shapes(_form(config))


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
    ends = Ends(np.stack(embedded), weights["lm_head.weight"])
    text, rest = range(len(tapped)), range(len(tapped), len(embedded))
    chain = reference_chain(
        _form(config), weights, ends, tapped, text, len(rest) + 1, chosen=[*rest, 0]
    )
    return chain.logits[-1]


def _form(config: HeadConfig) -> HeadForm:
    return HeadForm(
        d=config.hidden_size,
        ff=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        drafted=range(config.draft_vocab_size or config.vocab_size),
        taps=config.taps,
        theta=config.rope_theta,
        epsilon=config.rms_norm_eps,
    )


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
