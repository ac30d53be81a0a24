"""Derives tokenizer, template and settings from a GGUF file's metadata.

Pooling names and numbers are llama.cpp's (`llama_pooling_type` in llama.h). `support.py` decides
whether a file is supported.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.models.gguf.tokenizer import build_tokenizer
from paceline.models.gguf.vocabulary import (
    REQUIRED_FIELDS,
    token_facts,
    token_id,
    vocabulary_fault,
)
from paceline.models.manifest import GENERATION, TEMPLATE, TOKENIZER, Facts, Pooling
from paceline.storage.files import write_json
from paceline.storage.gguf_file import GgufFile, read_gguf, short
from paceline.storage.progress import Progress

_SETTINGS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""GGUF key after `general.sampling.` -> key of generation_config.json."""

_POOLINGS: Mapping[object, Pooling] = {1: "mean", 2: "first", 3: "last"}
"""Number in `pooling_type` -> how an embedding model pools a text into a vector."""


def read(path: Path, progress: Progress) -> GgufFile:
    """Read a GGUF file's metadata. Raises ModelError for a damaged file."""
    with progress.task(f"reading {path.name}"):
        return read_gguf(path)


def write_derived(path: Path, fields: Mapping[str, Any], work: Path) -> Facts:
    """Write tokenizer, chat template and settings into `work`. Raises ModelError and OSError."""
    facts = _facts(path, fields)
    tokenizer = build_tokenizer(path, fields)
    (work / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        (work / TEMPLATE).write_text(template, encoding="utf-8")
    # Empty without settings, so that the metadata is not read again.
    write_json(work / GENERATION, sampling_settings(fields))
    return facts


def _facts(path: Path, fields: Mapping[str, Any]) -> Facts:
    architecture = fields.get("general.architecture")
    if missing := [key for key in REQUIRED_FIELDS if key not in fields]:
        what = "a tokenizer.json next to the file cannot replace them: use another GGUF file"
        raise ModelError(f"{path} has no tokenizer: {', '.join(missing)} missing; {what}")
    if fault := vocabulary_fault(fields):
        raise ModelError(f"{path} has an invalid tokenizer: {fault}")
    context = fields.get(f"{architecture}.context_length")
    if not isinstance(context, int) or context < 1:
        raise ModelError(f"{path} has no context length ({short(architecture)}.context_length)")
    return Facts(
        **token_facts(fields),
        context_length=context,
        license=text if isinstance(text := fields.get("general.license"), str) else None,
        **pooling_facts(fields),
    )


def pooling_facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts `pooling` and `pooled_end`; empty without supported embeddings.

    The engine llamacpp was not compared with other implementations for bidirectional attention.
    """
    family = fields.get("general.architecture")
    pooling = _POOLINGS.get(fields.get(f"{family}.pooling_type"))
    if pooling is None or fields.get(f"{family}.attention.causal", True) is not True:
        return {}
    ends = fields.get("tokenizer.ggml.add_eos_token") is True
    return {"pooling": pooling, "pooled_end": token_id(fields, "eos") if ends else None}


def sampling_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings from GGUF metadata, under the keys of generation_config.json."""
    settings: dict[str, float] = {}
    for key, name in _SETTINGS.items():
        value = fields.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9:
            settings[name] = round(value, 6)  # the file has f32: 0.9 is 0.8999999761581421
    if fields.get("general.sampling.penalty_last_n") == 0:
        settings.pop("repetition_penalty", None)  # applies to no tokens
    return settings
