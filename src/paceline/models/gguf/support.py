"""Checks whether a model is supported: its layout, and this machine's memory.

Refuses GGUF files in the layout of ollama's own converters, before anything is derived from them.
Models from ollama's registry often have it; those that it downloaded from the Hugging Face Hub do
not. ollama itself checks for the same keys when it rewrites such a file in memory for
llama.cpp (llama/compat/llama-ollama-compat.cpp in github.com/ollama/ollama, at fb30760).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.files import megabytes
from paceline.storage.gguf_file import GgufFile, short
from paceline.storage.progress import Progress
from paceline.system.machine import memory_bytes

_ENCODERS = ("v.", "a.", "mm.", "model.vision_tower.")
"""Tensor name prefixes of image or audio encoders, which llama.cpp stores separately."""
DRAFTERS = {"dflash": "dflash", "eagle3": "mtp"}
"""Architecture of a drafter's file -> its name in `--drafter`."""
RENAMED = {"gptoss": "gpt-oss"}
"""ollama's name of an architecture -> llama.cpp's."""
_FIELDS = {
    "gemma3": ("mm.tokens_per_image", "rope.global.freq_base", "rope.local.freq_base"),
    "mistral3": ("rope.scaling.beta_fast", "rope.scaling.mscale_all_dim", "rope.scaling_beta"),
}
"""Metadata that only ollama's converter writes, by architecture."""
_REQUIRED = {"gemma3": "attention.layer_norm_rms_epsilon"}
"""Metadata that only ollama's converter omits."""

_OTHER_TYPES = {
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
    "mmproj": "a projector of images or audio",
}
"""`general.type` -> the kind of file."""

MEMORY_PER_BYTE = 1.2
"""Bytes of memory that a model needs per byte of its weights, without the KV cache: llama.cpp used
451 MB for a 0.6B model in Q4_0 of 380 MB."""


def check_layout(path: Path, file: GgufFile) -> None:
    """Raise ModelError, naming an alternative, for another kind of file, or ollama's layout."""
    fields, family = file.fields, short(file.fields.get("general.architecture"))
    if family in DRAFTERS:
        raise ModelError(
            f"{path} is a drafter, not a model; use it with --drafter {DRAFTERS[family]}:NAME"
        )
    if family == "clip":
        fields = {**fields, "general.type": "mmproj"}
    if (kind := fields.get("general.type", "model")) != "model":
        what = _OTHER_TYPES.get(str(kind), f"of the type {short(kind)}")
        raise ModelError(
            f"{path} is {what}, not a language model; use the GGUF file of the model that it "
            "belongs to"
        )
    if decision := next((name for name in fields if name.endswith(".decision.type")), None):
        raise ModelError(
            f"{path} is a classifier and writes no text ({short(decision)} is "
            f"{short(fields[decision])}); use the GGUF file of a language model"
        )
    marks = _marks(family, fields)
    encoders = [tensor.name for tensor in file.tensors if tensor.name.startswith(_ENCODERS)]
    if encoders:
        marks = [f"the tensor {short(encoders[0])}", *marks]
    if marks:
        known = RENAMED.get(family, family)
        raise ModelError(
            f"{path} has the layout of ollama's own converter, not llama.cpp's (it has "
            f"{marks[0]}), so it is not supported; use a {known} file from the Hugging Face Hub, "
            "such as those in `paceline models`"
        )


def _marks(family: str, fields: Mapping[str, Any]) -> list[str]:
    marks = [f"{family}.{name}" for name in _FIELDS.get(family, ()) if f"{family}.{name}" in fields]
    required = _REQUIRED.get(family)
    if required and f"{family}.{required}" not in fields:
        marks.append(f"no {family}.{required}")
    if family in RENAMED:
        marks.append(f"the architecture {family}")
    if family == "gemma4" and fields.get("tokenizer.ggml.model") == "llama":
        marks.append("the tokenizer llama")
    return marks


def memory_needed(weights: int) -> int:
    return int(weights * MEMORY_PER_BYTE)


def fits(weights: int) -> bool:
    return memory_needed(weights) <= memory_bytes()


def check_fits(name: str, weights: int, progress: Progress, advice: str = "") -> None:
    """Warn if weights of this many bytes are unlikely to fit, before anything is read.

    `advice` is a further alternative. Raises ModelError if the weights exceed the memory.
    """
    has = megabytes(memory_bytes())
    if weights > memory_bytes():
        raise ModelError(
            f"{name} has {megabytes(weights)}, but this machine has {has} of memory; choose a "
            f"smaller model or quantization{advice}"
        )
    if not fits(weights):
        progress.note(
            f"{name} needs about {megabytes(memory_needed(weights))} of memory, but this machine "
            f"has {has}"
        )
