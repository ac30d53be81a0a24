"""Tiny hybrid models: states as they are in memory, and a Qwen3.5 with a head in its file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engines.base import KVSequence
from paceline.engines.openvino.engine import OpenVinoEngine
from paceline.engines.state_blocks import StateTable
from paceline.storage.gguf_file import Tensor, read_gguf, write_gguf
from support.mtp import HeadForm, gguf_name
from support.tiny_checkpoints import write_gguf_of

HYBRIDS = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Forms of tiny checkpoints, one of each family."""

LAYERS = 4
CONFIG: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 96, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1},
}
"""Of a tiny Qwen3.5 that can have a head."""
HEAD = HeadForm(own=True, taps=(3,), heads=4, kv_heads=2, rotary=0.25, layers=LAYERS)


def with_head(
    path: Path,
    weights: Mapping[str, np.ndarray],
    others: Mapping[str, Any] | None = None,
    context: int = 512,
) -> Path:
    """Write a tiny Qwen3.5 with the head `weights`; `others` replace tensors called so."""
    about = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": LAYERS + 1}
    plain = write_gguf_of(
        "qwen3_5_text",
        path.with_name("plain.gguf"),
        fields=about,
        **CONFIG,
        max_position_embeddings=context,
    )
    file = read_gguf(plain)
    tensors = {item.name: item for item in file.tensors}
    for end, rows in (others or {}).items():
        for name, old in tensors.items():
            if name.split(".")[-2] == end:
                tensors[name] = _tensor(name, np.broadcast_to(rows, old.shape))
    for name, rows in weights.items():
        if name.startswith("mtp."):
            stored = gguf_name(name, LAYERS)
            tensors[stored] = _tensor(stored, rows + 1 if rows.ndim == 1 else rows)
    forms = {name: (value.kind, value.data.nbytes) for name, value in tensors.items()}
    changed = replace(file, tensors=list(tensors.values()))
    write_gguf(path, changed, forms, lambda tensor: tensor.data, lambda _done: None)
    return path


def _tensor(name: str, rows: np.ndarray) -> Tensor:
    stored = np.ascontiguousarray(rows, np.float32)
    return Tensor(name, stored.shape, 0, stored.view(np.uint8))


def state_of(engine: OpenVinoEngine, sequence: KVSequence) -> dict[str, bytes]:
    """The state of every recurrent layer that the next call would read, as it is in memory."""
    assert isinstance(sequence, StateTable)
    state = sequence._last(sequence.length)
    assert state is not None
    assert state.at == sequence.length
    assert state.block is not None
    tables = {name: array for name, (array, _) in engine._bound.items() if "state_table" in name}
    assert tables
    return {name: array[state.block].tobytes() for name, array in tables.items()}
