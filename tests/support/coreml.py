"""Core ML artifacts of random tiny models."""

from pathlib import Path
from typing import Any

from paceline.models import QUIET
from paceline.models.manifest import Facts

FACTS = Facts(
    context_length=512,
    stop_token_ids=(1,),
    bos_token_id=None,
    add_bos=False,
    bos_token=None,
    eos_token=None,
    license=None,
)


def tiny_llama(folder: Path, **changes: Any) -> Path:
    """A random Llama as a Hugging Face checkpoint."""
    import torch
    import transformers

    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "max_position_embeddings": 512,
        **changes,
    }
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            # At first a random model says nearly the same whatever it reads.
            weight.mul_(3) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    return folder


def tiny_artifact(folder: Path, **recipe: Any) -> Path:
    """An artifact of `tiny_llama` in two packages of layers and two of the head."""
    from paceline.coreml.convert import Recipe, Source, convert

    checkpoint = tiny_llama(folder / "checkpoint")
    (checkpoint / "tokenizer.json").write_text("{}")
    settings: dict[str, Any] = {"topology": "2+1", "head_rows": 100, "slots": 192, **recipe}
    source = Source("tiny", checkpoint, checkpoint, FACTS)
    return convert(source, folder / "artifact", Recipe(**settings), progress=QUIET).folder
