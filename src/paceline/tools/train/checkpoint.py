"""Writes a DFlash checkpoint in z-lab's public form, so that other runtimes can load it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.dflash.checkpoint import ARCHITECTURE, CONFIG, DRAFT_VOCAB, Config
from paceline.storage.files import write_json, writing

WEIGHTS = "model.safetensors"


def save_checkpoint(
    weights: dict[str, Tensor],
    config: Config,
    folder: Path,
    *,
    draft_vocab: Sequence[int] | None = None,
) -> None:
    """Write `config.json`, the weights in bf16 and, if given, the tokens to draft.

    Each file in `folder` is replaced atomically.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        halved = {name: each.detach().to("cpu", torch.bfloat16) for name, each in weights.items()}
        save_file(halved, folder / f".{WEIGHTS}", metadata={"format": "pt"})
        (folder / f".{WEIGHTS}").replace(folder / WEIGHTS)
        if draft_vocab is None:
            (folder / DRAFT_VOCAB).unlink(missing_ok=True)
        else:
            np.save(folder / f".{DRAFT_VOCAB}", np.array(draft_vocab, np.uint32))
            (folder / f".{DRAFT_VOCAB}").replace(folder / DRAFT_VOCAB)
        write_json(folder / CONFIG, config_json(config))


def config_json(config: Config) -> dict[str, Any]:
    """The fields of `config.json`: those of transformers' Qwen3, and z-lab's `dflash_config`."""
    window = next((each for each in config.windows if each is not None), None)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_cache": True,
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": [
            "full_attention" if each is None else "sliding_attention" for each in config.windows
        ],
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        },
    }
