"""Reads and checks the metadata of a drafter's GGUF file before llama.cpp maps it.

llama.cpp ends the process if sizes do not fit each other or the target, so they are compared
first. Keys and tensors are those of its `src/models/eagle3.cpp` and `dflash.cpp`.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, NumberArray, read_gguf

INSIDE = "nextn_predict_layers"
"""Key of the number of MTP layers, after the model's architecture."""

_INT64 = 27
"""A tensor's `GGMLQuantizationType`."""

_EAGLE_LAYERS = 3
_MAX_BLOCK = 64
"""Maximum rows of a block that runs in one pass; see `PIECE` in `draft_context.py`."""


@dataclass(frozen=True, slots=True)
class DraftFile:
    path: Path
    kind: str
    """`dflash` or `mtp`: the drafting method."""
    form: str
    """Its architecture, under its publishers' name."""
    taps: tuple[int, ...]
    """Layers of the target whose output hidden states it reads, from 0."""
    target_width: int
    """Size of such a state."""
    vocab_size: int
    block: int = 0
    """DFlash: rows of a block, its first token included."""
    mask: int = 0
    """Token of the rows to fill."""
    first: int = 1
    """The first row of a block that is a draft."""
    causal: bool = False
    """True if a row of a block sees only the rows before it."""
    candidates: int = 0
    """DFlash 2: candidates per row; 0: rows have logits."""
    is_inside: bool = False
    """True if it consists of layers in its target's own file."""
    confident: bool = False
    """True if it estimates the acceptance probabilities of its drafts."""


def read_drafter(path: Path) -> DraftFile | None:
    """Read the GGUF file at a path, or the only one in a folder.

    Returns None if it is neither a drafter nor a model with MTP layers inside. Raises ModelError
    for a faulty one.
    """
    files = [*path.glob("*.gguf")] if path.is_dir() else [path]
    if len(files) != 1 or files[0].suffix != ".gguf":
        return None
    return _read(files[0], files[0].stat().st_mtime_ns if files[0].exists() else 0)


@lru_cache(maxsize=16)
def _read(path: Path, _changed: int) -> DraftFile | None:
    content = read_gguf(path)
    if content.family == "dflash":
        return _dflash(path, content)
    if content.family == "eagle3":
        return _eagle3(path, content)
    own = _number(path, content, INSIDE, 0)
    if not own:
        return None
    width = _number(path, content, "embedding_length")
    last = _number(path, content, "block_count") - own - 1
    return DraftFile(path, "mtp", "MTP", (last,), width, _vocabulary(path, content), is_inside=True)


def _dflash(path: Path, content: GgufFile) -> DraftFile:
    tensors = {tensor.name for tensor in content.tensors}
    width = _number(path, content, "embedding_length")
    block = _number(path, content, "block_size", 16)
    is_dspark, is_second = "markov_w1.weight" in tensors, "selector_hidden.weight" in tensors
    mask, vocab = content.fields.get("tokenizer.ggml.mask_token_id"), _vocabulary(path, content)
    if not 2 <= block <= _MAX_BLOCK:
        raise _fault(path, f"has blocks of {block} tokens", f"2 to {_MAX_BLOCK}")
    if not isinstance(mask, int) or not 0 <= mask < vocab:
        raise _fault(path, f"has the mask token {mask}", f"a number below {vocab}")
    return DraftFile(
        path,
        "dflash",
        "DSpark" if is_dspark else "DFlash 2" if is_second else "DFlash",
        _taps(path, content, width),
        width,
        vocab,
        block=block,
        mask=mask,
        first=int(not (is_dspark and content.family_value("sample_from_anchor", True))),
        causal=bool(content.family_value("attention.causal")),
        candidates=_number(path, content, "selector_top_k", 0) if is_second else 0,
        confident="conf_proj.weight" in tensors,
    )


def _eagle3(path: Path, content: GgufFile) -> DraftFile:
    width = _number(path, content, "embedding_length")
    target_width = _number(path, content, "target_hidden_size")
    taps = _taps(path, content, target_width)
    if (count := _number(path, content, "block_count")) != 1:
        raise _fault(path, f"has {count} layers", "1")
    tensors = {tensor.name for tensor in content.tensors}
    if "token_embd.weight" not in tensors and width != target_width:
        raise _fault(path, "has no embeddings of its own width", "token_embd.weight")
    vocab = _vocabulary(path, content)
    for tensor in content.tensors:
        if tensor.name == "d2t":  # each row of its head -> token
            tokens = tensor.data.view(np.int64) if tensor.kind == _INT64 else np.array([-1])
            if not 0 <= tokens.min() <= tokens.max() < vocab:
                raise _fault(path, "drafts tokens that it does not have", f"0 to {vocab - 1}")
    return DraftFile(path, "mtp", "EAGLE-3", taps, target_width, vocab)


def _taps(path: Path, content: GgufFile, target_width: int) -> tuple[int, ...]:
    """Return the target's layers, from 0; checks the matrix that reads their states."""
    value = content.family_value("target_layers")
    layers: list[int] = value.values.tolist() if isinstance(value, NumberArray) else []
    if not layers or not all(isinstance(layer, int) and layer > 0 for layer in layers):
        raise _fault(path, f"reads layers {layers or 'unknown'}", "whole numbers of at least 1")
    if content.family == "eagle3" and len(layers) != _EAGLE_LAYERS:
        raise _fault(path, f"reads {len(layers)} layers", str(_EAGLE_LAYERS))
    shape = next((tensor.shape for tensor in content.tensors if tensor.name == "fc.weight"), None)
    expected = (_number(path, content, "embedding_length"), target_width * len(layers))
    if shape != expected:
        raise _fault(path, f"has fc.weight of {shape}", str(expected))
    return tuple(layer - 1 for layer in layers)


def _vocabulary(path: Path, content: GgufFile) -> int:
    tokens = content.fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len({*tokens}) < len(tokens):
        raise _fault(path, "has no tokens, or duplicates", "tokenizer.ggml.tokens")
    return len(tokens)


def _number(path: Path, content: GgufFile, key: str, default: int | None = None) -> int:
    value: Any = content.family_value(key, default)
    if not isinstance(value, int) or value < 0:
        raise _fault(path, f"has {content.family}.{key} {value!r}", "a number")
    return value


def _fault(path: Path, what: str, expected: str) -> ModelError:
    return ModelError(
        f"{path} {what}; expected {expected}: download it again, or use another drafter"
    )
