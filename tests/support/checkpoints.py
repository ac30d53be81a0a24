"""Hugging Face checkpoints, without torch and transformers."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.models import TOKENIZER, ModelFiles

CONFIG = {"max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": 1}


def write_checkpoint(folder: Path, files: ModelFiles) -> Path:
    """Write the words of a model, and weights that no engine opens here; return `folder`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in (TOKENIZER, "chat_template.jinja"):
        (folder / name).write_bytes((files.folder / name).read_bytes())
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, values in tensors.items():
        kind = _KEPT.get(values.dtype.name, dtype)
        rows = values if kind != dtype else stored(values, dtype)
        ends = [len(data), len(data) + rows.nbytes]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": ends}
        data += np.ascontiguousarray(rows).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


_KEPT = {"uint8": "U8", "int64": "I64", "bool": "BOOL"}
_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Floats as they lie in a file; bfloat16 is the upper two bytes of a float32."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(_FLOATS[dtype])
