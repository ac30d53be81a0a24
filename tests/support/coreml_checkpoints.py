"""Random tiny checkpoints with a tokenizer, to convert and to compare with `golden`."""

import json
from pathlib import Path
from typing import Any

from paceline.models.checkpoints import read_facts
from support.coreml import convert_source, tiny_source

VOCAB = 160
BOS = 1
RARE = 8
"""The number of last tokens with embeddings near zero, like tokens absent from training."""

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_SIZES, "num_hidden_layers": 3}),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            **_SIZES,
            "block_multiple_of": 16,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "zaya": (
        "ZayaForCausalLM",
        {
            **_SIZES,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "router_hidden_size": 24,
            "initializer_range": 0.25,
        },
    ),
}
"""Transformers' class and the settings of its config."""


def tiny_checkpoint(
    folder: Path, model: str = "llama", *, seed: int = 0, bos: bool = False
) -> Path:
    """A random model in which every weight has an effect; `bos`: the tokenizer adds BOS."""
    import torch
    import transformers

    name, settings = MODELS[model]
    torch.manual_seed(seed)
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**settings)
    made: Any = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, weight in made.named_parameters():
            # Initially norms are 1, biases 0, and outputs hardly depend on the tokens.
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif model != "zaya":
                weight.normal_(std=0.7) if key.endswith("conv.weight") else weight.mul_(3)
        made.get_input_embeddings().weight[-RARE:] *= 1e-6
    made.save_pretrained(folder)
    write_tokenizer(folder, bos=bos)
    return folder


def write_tokenizer(folder: Path, *, bos: bool = False) -> None:
    """A tokenizer of a few control tokens and the printable ASCII characters."""
    from tokenizers import Tokenizer, models, processors

    characters = ["<unk>", "<s>", "</s>", "\n", *map(chr, range(32, 127))]
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(characters[:3])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def convert_tiny(checkpoint: Path, out: Path, **options: Any) -> Path:
    """Its Core ML form in two packages of layers and two of the head, with all layers tapped."""
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    settings = {"topology": f"{layers - 1}+1", "head_rows": VOCAB // 2, "slots": 64, "taps": "all"}
    if "functions" not in options:
        settings["rows"] = 3
    source = tiny_source(out.parent, checkpoint)._replace(
        tokenizer=checkpoint / "tokenizer.json", facts=read_facts(checkpoint)
    )
    return convert_source(source, out, **{**settings, **options})
