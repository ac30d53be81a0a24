"""A random tiny ZAYA, and Core ML artifacts of it."""

from pathlib import Path
from typing import Any

from support.coreml import convert_source, tiny_source

EXPERTS, LAYERS = 5, 2

BIAS_OF_NONE = 0.15
"""Balancing bias of the class "no expert". transformers saves it, but loads -1 in its place."""

SETTINGS: dict[str, Any] = {
    "hidden_size": 48,
    "moe_intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "num_experts": EXPERTS,
    "router_hidden_size": 24,
    "max_position_embeddings": 512,
    # Large enough that routers distinguish tokens.
    "initializer_range": 0.25,
}


def tiny_zaya(folder: Path, **changes: Any) -> Path:
    """A random ZAYA as a Hugging Face checkpoint; some rows skip its experts."""
    import torch
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.ZayaForCausalLM(transformers.ZayaConfig(**{**SETTINGS, **changes}))
    with torch.no_grad():
        for vector in model.parameters():
            if vector.dim() == 1:
                # Biases that are all 0 would be stored once.
                vector.add_(torch.randn_like(vector) * 0.2)
        # Initially the outputs hardly depend on the tokens.
        model.model.embed_tokens.weight.mul_(4)
        for layer in model.model.layers:
            layer.mlp.gate.router_mlp.out_proj.weight.mul_(2)
            layer.mlp.gate.balancing_biases[-1] = BIAS_OF_NONE
    model.save_pretrained(folder)
    return folder


def zaya_artifact(folder: Path, **options: Any) -> Path:
    """An artifact of `tiny_zaya` in one package of layers and one of the head."""
    source = tiny_source(folder, tiny_zaya(folder / "checkpoint"))
    settings = {"slots": 64, "weights": "f16", **options}
    return convert_source(source, folder / "artifact", **settings)
