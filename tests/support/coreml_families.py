"""Random tiny checkpoints of every Core ML family, with transformers' model of each.

A new family is a new entry of `FORMS`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from paceline_coreml.conversion.family import Family


SLOTS, ROWS = 64, 4
VOCAB = 163
EXPERTS = 5
"""Of a ZAYA."""


def heads(queries: int, keys: int, size: int) -> dict[str, int]:
    """Heads of queries, those of keys and values, and the size of one: as a published model's.

    Their ratio and size are those; the model is as narrow as can be.
    """
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": size}


def whole(queries: int, keys: int, size: int) -> dict[str, int]:
    """The same where the heads divide the model's width."""
    sizes = heads(queries, keys, size)
    del sizes["head_dim"]
    return {**sizes, "hidden_size": queries * size}


LLAMA = {
    **heads(8, 2, 64),
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# RoPE on 96 of the 128 dimensions of a head.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 32 for i in range(48)],
    "long_factor": [3.0 + i / 3 for i in range(48)],
}
PHI3 = {
    **{key: value for key, value in LLAMA.items() if key != "head_dim"},
    **whole(2, 2, 96),
    "pad_token_id": None,
    "original_max_position_embeddings": SLOTS,
}
LFM2 = {
    **{key: value for key, value in LLAMA.items() if key != "head_dim"},
    **whole(4, 2, 64),
    "num_hidden_layers": 4,
    "block_multiple_of": 16,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
LFM2_MOE = {
    **{key: value for key, value in LLAMA.items() if key != "head_dim"},
    **whole(4, 1, 64),
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

ZAYA: dict[str, Any] = {
    **{**LLAMA, **heads(8, 2, 128)},
    "moe_intermediate_size": 20,
    "num_experts": EXPERTS,
    "router_hidden_size": 24,
    # Large enough that routers distinguish tokens.
    "initializer_range": 0.25,
}
ZAYA.pop("intermediate_size")

WINDOW = 5
"""Tokens that the classifier's attention sees on each side."""
PRIVACY_FILTER = {
    **{**LLAMA, **heads(14, 2, 64)},
    "intermediate_size": 20,
    "num_local_experts": 12,
    "num_experts_per_tok": 4,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "eos_token_id": 0,
    # Low enough that the experts' clamps apply.
    "swiglu_limit": 1.5,
    # Large enough that attention and routers distinguish tokens.
    "initializer_range": 0.25,
}
PRIVACY_FILTER.pop("max_position_embeddings")


def form(
    name: str, settings: dict[str, Any], *more: dict[str, Any], **changes: Any
) -> tuple[str, dict[str, Any]]:
    """A class of transformers, and the settings of its config."""
    for part in more:
        settings = settings | part
    return f"{name}ForCausalLM", settings | changes


PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
DEFAULT = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
TIED = {"tie_word_embeddings": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": SLOTS, "max_window_layers": 1}
FACTOR = {**LONGROPE, "attention_factor": 1.5}
CLASSIFIER = "OpenAIPrivacyFilterForTokenClassification"

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": form("Llama", LLAMA),
    "llama, tied, with a head size of its own": form("Llama", LLAMA, heads(6, 2, 128), TIED),
    "llama 3's long context": form("Llama", LLAMA, heads(8, 2, 128), rope_parameters=LLAMA3_ROPE),
    "llama with biases": form("Llama", LLAMA, heads(8, 1, 80), attention_bias=True),
    "qwen3": form("Qwen3", LLAMA, heads(4, 2, 128)),
    "qwen3, tied, with biases, each head with its keys": form(
        "Qwen3", LLAMA, heads(2, 2, 128), TIED, attention_bias=True
    ),
    "qwen3 with yarn": form("Qwen3", LLAMA, heads(8, 2, 128), rope_parameters=YARN),
    "qwen3 with a window that no text is longer than": form(
        "Qwen3", LLAMA, heads(16, 2, 128), WINDOWS
    ),
    "phi-3": form("Phi3", PHI3),
    "phi-4-mini": form(
        "Phi3", PHI3, whole(6, 2, 128), TIED, rope_parameters=LONGROPE, sliding_window=4 * SLOTS
    ),
    "phi-4-mini, one group, with an attention factor": form(
        "Phi3", PHI3, whole(3, 1, 128), rope_parameters=FACTOR
    ),
    "phi-3, of which half turns": form("Phi3", PHI3, rope_parameters=PARTIAL),
    "hunyuan": form("HunYuanDenseV1", LLAMA, heads(8, 2, 128)),
    "hunyuan with alpha, tied": form(
        "HunYuanDenseV1", LLAMA, heads(4, 1, 128), TIED, rope_parameters=ALPHA
    ),
    "hunyuan with biases": form("HunYuanDenseV1", LLAMA, heads(2, 2, 128), attention_bias=True),
    "lfm2": form("Lfm2", LFM2),
    "lfm2 with biases, a longer convolution and feed-forwards as they are said": form(
        "Lfm2",
        LFM2,
        conv_bias=True,
        conv_L_cache=4,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "lfm2 with a convolution of two, and feed-forwards made wider": form(
        "Lfm2", LFM2, conv_L_cache=2, block_ffn_dim_multiplier=1.3
    ),
    "lfm2 of convolutions": form("Lfm2", LFM2, layer_types=["conv"] * 4),
    "lfm2 of attention": form(
        "Lfm2", LFM2, layer_types=["full_attention"] * 4, num_key_value_heads=4
    ),
    "lfm2 with experts": form("Lfm2Moe", LFM2_MOE),
    "lfm2 with experts, one of them, without a bias": form(
        "Lfm2Moe", LFM2_MOE, num_experts_per_tok=1, use_expert_bias=False, num_dense_layers=0
    ),
    "lfm2 with experts, three of them, not to a sum of one, scaled": form(
        "Lfm2Moe", LFM2_MOE, num_experts_per_tok=3, norm_topk_prob=False, routed_scaling_factor=2.5
    ),
    "lfm2 with experts, four of them, with biases": form(
        "Lfm2Moe", LFM2_MOE, num_experts_per_tok=4, conv_bias=True, tie_word_embeddings=False
    ),
    "zaya": form("Zaya", ZAYA),
    "privacy filter": (CLASSIFIER, PRIVACY_FILTER),
    "privacy filter with default rope": (
        CLASSIFIER,
        {**PRIVACY_FILTER, "rope_parameters": DEFAULT},
    ),
}
"""Name -> transformers' class and the settings of its config."""
CAUSAL = [form for form in FORMS if not form.startswith("privacy")]
ONE_PER_FAMILY = [
    *("llama", "qwen3", "phi-3", "hunyuan", "lfm2", "lfm2 with experts", "zaya", "privacy filter")
]


class TinyModel:
    """A checkpoint on disk and its model in transformers; every weight has an effect."""

    def __init__(
        self, form: str, folder: Path, *, seed: int = 0, rare: int = 0, **changes: Any
    ) -> None:
        """Write a form with `changes`; its last `rare` tokens have embeddings near zero."""
        import torch
        import transformers

        name, settings = FORMS[form]
        settings = {**settings, **changes}
        model_class = getattr(transformers, name)
        torch.manual_seed(seed)
        self.model: Any = model_class(model_class.config_class(**settings)).eval().float()
        with torch.no_grad():
            # Initially norms are 1, biases 0, and outputs hardly depend on the tokens.
            for key, weight in [*self.model.named_parameters(), *self.model.named_buffers()]:
                if (weight.dim() == 1 or key.endswith("_bias")) and "inv_freq" not in key:
                    weight.add_(torch.randn_like(weight) * 0.2)
                elif key.endswith("conv.weight"):
                    weight.normal_(std=0.7)
                elif weight.dim() > 1 and "initializer_range" not in settings:
                    weight.mul_(3)
            if form == "zaya":
                distinguish_tokens(self.model)
            if rare:
                self.model.get_input_embeddings().weight[-rare:] *= 1e-6
            # As packages have them, so that what differs from them is not the weights.
            for weight in self.model.parameters():
                weight.copy_(weight.half())
        self.model.save_pretrained(folder)
        self.model.config.use_cache = False
        self.folder, self.lags = folder, settings.get("conv_L_cache", 3) - 1

    def family(self) -> "Family":
        from paceline_coreml.conversion.families import open_family

        return open_family(self.folder, slots=SLOTS, conv_slots=ROWS + self.lags)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        import torch

        with torch.no_grad():
            found: np.ndarray = self.model(torch.tensor([list(tokens)])).logits[0].numpy()
        return found


def distinguish_tokens(zaya: Any) -> None:
    """Scale a random ZAYA so that routers pick all experts, and "no expert", for some tokens."""
    zaya.model.embed_tokens.weight.mul_(4)
    for layer in zaya.model.layers:
        layer.self_attn.qk_norm.temp.add_(1)
        layer.self_attn.o_proj.weight.mul_(0.3)
        layer.mlp.gate.router_mlp.out_proj.weight.mul_(2)
        layer.mlp.gate.balancing_biases[:-1] *= 0.4
        layer.mlp.gate.balancing_biases[-1] = 0.15
