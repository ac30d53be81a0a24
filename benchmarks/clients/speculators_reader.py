"""speculators, the library of vLLM's project for drafters, reads heads in the form of `train mtp`.

    python benchmarks/clients/speculators_reader.py

Needs `speculators==0.9.*` and the test tools in one environment. A head of random weights, for a
random Llama of ten layers: the library's converter finds every name and shape, its model loads what
it wrote, and the tensors are ours. Exits with 1 if one is not.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from loguru import logger
from safetensors.torch import load_file
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.drafters.mtp import HeadConfig
from paceline_lab.train.mtp_checkpoint import save_head

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.eagle import random_head

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
LAYERS = 10
DRAFTED = range(3, 103)


def main() -> None:
    """Write a head in our form, convert it, load it, and compare every tensor."""
    warnings: list[str] = []
    logger.remove()
    logger.add(warnings.append, level="WARNING", format="{message}")
    with TemporaryDirectory() as folder:
        target, ours, theirs = (Path(folder) / name for name in ("target", "ours", "theirs"))
        sizes = {**SIZES, "num_hidden_layers": LAYERS}
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(target)
        write(ours)
        Eagle3Converter().convert(ours, theirs, base_model=str(target))
        expected = load_file(ours / "model.safetensors")
        tensors = Eagle3DraftModel.from_pretrained(str(theirs)).state_dict()
    for key, tensor in expected.items():
        other = tensors[key.replace("midlayer.", "layers.0.")]
        if not torch.equal(other.to(tensor.dtype), tensor):
            sys.exit(f"{key} is another tensor in speculators")
    # "Missing keys in checkpoint", "Unexpected keys in checkpoint"
    if faults := [warning for warning in warnings if "keys" in warning]:
        sys.exit("".join(faults))
    print(f"{len(expected)} tensors of {Eagle3DraftModel.__name__} are ours")


def write(folder: Path) -> None:
    """Write a head as `train mtp` does."""
    config = HeadConfig(
        **SIZES,
        rotary_dims=SIZES["head_dim"],
        draft_vocab_size=len(DRAFTED),
        taps=(1, 4, 6),
        num_target_layers=LAYERS,
    )
    weights = {name: torch.tensor(rows) for name, rows in random_head(config).items()}
    save_head(weights, config, torch.tensor(DRAFTED), folder, context_length=512)


if __name__ == "__main__":
    main()
