"""speculators, the library of vLLM's project for drafters, reads heads in the form of `train`.

    python benchmarks/clients/speculators_reader.py

Needs `speculators==0.9.*` and the test tools in one environment. Random weights of every shape that
`train mtp` and `train dflash` write, for a random Llama of ten layers: the library's converters
find every name and shape, its models load what they wrote, and the tensors are ours. Exits with 1
if one is not.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from loguru import logger
from safetensors.torch import load_file
from speculators.convert.dflash import DFlashConverter
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.dflash import DFlashDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.drafters.dflash import Config
from paceline.drafters.mtp import HeadConfig
from paceline.tools.train.checkpoint import save_checkpoint
from paceline.tools.train.mtp_checkpoint import save_head

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.dflash import random_weights
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

Tensors = Mapping[str, torch.Tensor]


def main() -> None:
    """Check both forms."""
    warnings: list[str] = []
    logger.remove()
    logger.add(warnings.append, level="WARNING", format="{message}")
    with TemporaryDirectory() as made:
        folder = Path(made)
        target = folder / "target"
        sizes = {**SIZES, "num_hidden_layers": LAYERS}
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(target)
        read("train mtp", eagle3, folder, target, Eagle3DraftModel)
        read("train dflash", dflash, folder, target, DFlashDraftModel)
    # "Missing keys in checkpoint", "Unexpected keys in checkpoint"
    faults = [each for each in warnings if "keys" in each]
    sys.exit("".join(faults) if faults else 0)


def read(
    name: str,
    write: Callable[[Path, Path, Path], Tensors],
    folder: Path,
    target: Path,
    model: Any,
) -> None:
    """Write a head in our form, convert it, load it, and compare every tensor."""
    ours, theirs = folder / f"{name} ours", folder / f"{name} theirs"
    expected = write(ours, theirs, target)
    found = model.from_pretrained(str(theirs)).state_dict()
    for key, tensor in expected.items():
        other = found[key.replace("midlayer.", "layers.0.")]
        if not torch.equal(other.to(tensor.dtype), tensor):
            sys.exit(f"{name}: {key} is another tensor in speculators")
    print(f"{name}: {len(expected)} tensors of {model.__name__} are ours")


def eagle3(ours: Path, theirs: Path, target: Path) -> Tensors:
    """A head of `train mtp`."""
    config = HeadConfig(
        **SIZES,
        rotary_dims=SIZES["head_dim"],
        draft_vocab_size=len(DRAFTED),
        taps=(1, 4, 6),
        num_target_layers=LAYERS,
    )
    weights = {name: torch.tensor(rows) for name, rows in random_head(config).items()}
    save_head(weights, config, torch.tensor(DRAFTED), ours, context_length=512)
    Eagle3Converter().convert(ours, theirs, base_model=str(target))
    return load_file(ours / "model.safetensors")


def dflash(ours: Path, theirs: Path, target: Path) -> Tensors:
    """A drafter of `train dflash`."""
    config = Config(
        **SIZES,
        num_hidden_layers=2,
        block_size=8,
        num_target_layers=LAYERS,
        target_layer_ids=(1, 4, 7),
        mask_token_id=319,
        windows=(None, None),
    )
    weights = {name: torch.tensor(rows) for name, rows in random_weights(config).items()}
    save_checkpoint(weights, config, ours)
    DFlashConverter().convert(ours, theirs, base_model=str(target))
    return load_file(ours / "model.safetensors")


if __name__ == "__main__":
    main()
