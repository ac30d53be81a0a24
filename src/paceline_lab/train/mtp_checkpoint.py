"""Writes a head in EAGLE-3's public form, as vLLM and SGLang load it.

`config.json` is that of a Llama of one layer; `d2t` has, for each draft token, the difference of
its token of the target, and `t2d` is true for the tokens that are drafted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.mtp import HeadConfig
from paceline.storage.files import write_json, writing

ARCHITECTURE = "LlamaForCausalLMEagle3"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def save_head(
    weights: dict[str, Tensor],
    config: HeadConfig,
    drafted: Sequence[int],
    folder: Path,
    *,
    context_length: int,
) -> None:
    """Write `config.json` and the weights in bf16. Each file is replaced atomically.

    Args:
        weights: of the head, by name.
        config: its shape.
        drafted: [draft_vocab], the tokens of the head's rows, ascending.
        folder: created if missing.
        context_length: of the target, in tokens.
    """
    tokens = torch.tensor(drafted)
    halved = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in weights.items()}
    is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
    is_drafted[tokens] = True
    tensors = {**halved, "d2t": tokens - torch.arange(len(tokens)), "t2d": is_drafted}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / f".{WEIGHTS}", metadata={"format": "pt"})
        (folder / f".{WEIGHTS}").replace(folder / WEIGHTS)
        write_json(folder / CONFIG, config_json(config, context_length))


def config_json(config: HeadConfig, context_length: int) -> dict[str, Any]:
    """The fields of `config.json`: transformers' Llama, and those of EAGLE-3.

    Tapped layers are named only if they are not those that runtimes take by themselves.
    """
    layers = config.num_target_layers or 0
    usual = (1, layers // 2 - 1, layers - 4)
    # vLLM counts layers by their inputs: its layer j has the output of layer j - 1.
    named = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps]}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": context_length,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        **({} if config.taps == usual else named),
    }
