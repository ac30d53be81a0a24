"""Random tiny checkpoints with a tokenizer, to convert and to compare with `golden`."""

import json
from pathlib import Path
from typing import Any

from paceline.models.checkpoints import read_facts
from support.coreml import SIZES, convert_source, tiny_source

VOCAB = 160
BOS = 1
RARE = 8
"""The number of last tokens with embeddings near zero, like tokens absent from training."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "head_dim": 16},
    "lfm2": {**SIZES, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "zaya": {**SIZES, "num_hidden_layers": 2, "head_dim": 16},
    "privacy filter": {**SIZES, "num_hidden_layers": 2, "head_dim": 16, "swiglu_limit": 7.0},
}
"""Form of `coreml_families` -> its sizes here."""


def tiny_checkpoint(
    folder: Path, model: str = "llama", *, seed: int = 0, bos: bool = False
) -> Path:
    """A random model whose weights all have an effect; `bos`: the tokenizer adds BOS."""
    from support.coreml_families import TinyModel

    TinyModel(model, folder, seed=seed, rare=RARE, **MODELS[model])
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
    """Convert it to two Core ML packages of layers and two of the head, with all layers tapped."""
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    settings = {"topology": f"{layers - 1}+1", "head_rows": VOCAB // 2, "slots": 64, "taps": "all"}
    if "functions" not in options:
        settings["rows"] = 3
    source = tiny_source(out.parent, checkpoint)._replace(
        tokenizer=checkpoint / "tokenizer.json", facts=read_facts(checkpoint)
    )
    return convert_source(source, out, **{**settings, **options})


def zaya_artifact(folder: Path, **options: Any) -> Path:
    """An artifact of a ZAYA in one package of layers and one of the head."""
    source = tiny_source(folder, tiny_checkpoint(folder / "checkpoint", "zaya"))
    settings = {"slots": 64, "weights": "f16", **options}
    return convert_source(source, folder / "artifact", **settings)
