"""Writes a head that reads logits, in the form of `paceline.drafters.mtp.logits_head`."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from paceline.drafters.mtp import Embeddings, HeadConfig
from paceline.drafters.mtp.logits_head import (
    ARCHITECTURE,
    CONFIG,
    DRAFTED,
    SCALE,
    ConfigFile,
    matrices_of,
    shapes_of,
)
from paceline.storage.files import write_json, writing
from paceline.storage.int8 import Int8Matrix, quantized
from paceline_lab.train.logits import LogitsReader

Array = npt.NDArray[np.float32]
WEIGHTS = "model.safetensors"


def save_logits_head(
    weights: Mapping[str, Array],
    config: HeadConfig,
    embeddings: Embeddings,
    reader: LogitsReader,
    folder: Path,
) -> None:
    """Write `config.json` and the weights, matrices in int8. Each file is replaced atomically.

    Args:
        weights: of a head in EAGLE-3's form that reads hidden states as `reader` returns them.
        config: its shape.
        embeddings: with which it was trained.
        reader: makes states of logits.
        folder: created if missing.
    """
    file = ConfigFile(
        architectures=[ARCHITECTURE],
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=len(embeddings.drafted.whole),
        rank=embeddings.into.shape[1],
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        logits_of=reader.tokens,
    )
    parts: dict[str, Array | Int8Matrix] = {
        **weights,
        "fc.weight": weights["fc.weight"] @ reader.inverse.T,
        **{f"embeddings.{level}": part for level, part in asdict(embeddings).items()},
    }
    shapes = shapes_of(file)
    matrices = matrices_of(shapes)
    tensors: dict[str, npt.NDArray[np.generic]] = {DRAFTED: reader.drafted.astype(np.int32)}
    for name, shape in shapes.items():
        part = parts[name]
        if name in matrices:
            matrix = part if isinstance(part, Int8Matrix) else quantized(part)
            tensors[name], tensors[f"{name}{SCALE}"] = matrix
        else:
            tensors[name] = np.asarray(part, np.float16)
        assert tensors[name].shape == shape, f"{name} is {tensors[name].shape}, expected {shape}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / f".{WEIGHTS}", metadata={"format": "pt"})
        (folder / f".{WEIGHTS}").replace(folder / WEIGHTS)
        write_json(folder / CONFIG, asdict(file))
