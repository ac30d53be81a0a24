"""GGUF files in the layout of ollama's own converters, which llama.cpp's readers do not take.

ollama's models from its registry are often such files; those that it fetched from the hub are not.
The marks are those that ollama itself looks for when it rewrites such a file in memory for
llama.cpp (llama/compat/llama-ollama-compat.cpp in github.com/ollama/ollama, at fb30760).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, short

_ENCODERS = ("v.", "a.", "mm.", "model.vision_tower.")
"""First parts of the names of an image or audio encoder's tensors, which llama.cpp keeps apart."""
RENAMED = {"gptoss": "gpt-oss"}
"""ollama's name of an architecture -> llama.cpp's."""
_FIELDS = {
    "gemma3": ("mm.tokens_per_image", "rope.global.freq_base", "rope.local.freq_base"),
    "mistral3": ("rope.scaling.beta_fast", "rope.scaling.mscale_all_dim", "rope.scaling_beta"),
}
"""Metadata that only ollama's converter writes, by architecture."""
_REQUIRED = {"gemma3": "attention.layer_norm_rms_epsilon"}
"""Metadata that only ollama's converter leaves out."""


def check_layout(path: Path, file: GgufFile) -> None:
    """Raise ModelError, with what works instead, for a file in ollama's own layout.

    For files of families that run here, and those in `RENAMED`.
    """
    fields, family = file.fields, short(file.fields.get("general.architecture"))
    marks = _marks(family, fields)
    inside = [each.name for each in file.tensors if each.name.startswith(_ENCODERS)]
    if inside:
        marks = [f"the tensor {short(inside[0])}", *marks]
    if marks:
        known = RENAMED.get(family, family)
        raise ModelError(
            f"{path} is in the layout of ollama's own converter, not in llama.cpp's (it has "
            f"{marks[0]}), so it does not run here; use a {known} file of the hub instead, such as "
            "those in `paceline models`"
        )


def _marks(family: str, fields: Mapping[str, Any]) -> list[str]:
    found = [f"{family}.{name}" for name in _FIELDS.get(family, ()) if f"{family}.{name}" in fields]
    required = _REQUIRED.get(family)
    if required and f"{family}.{required}" not in fields:
        found.append(f"no {family}.{required}")
    if family in RENAMED:
        found.append(f"the architecture {family}")
    if family == "gemma4" and fields.get("tokenizer.ggml.model") == "llama":
        found.append("the tokenizer llama")
    return found
