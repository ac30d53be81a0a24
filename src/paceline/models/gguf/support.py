"""Whether a model runs here: its family, layout and types of weights, and this machine's memory.

Refuses GGUF files that OpenVINO's frontend does not read, before anything is made of them. Among
them are those in the layout of ollama's own converters. ollama's models from its registry are often
such files; those that it fetched from the hub are not. The marks are those that ollama itself looks
for when it rewrites such a file in memory for llama.cpp (llama/compat/llama-ollama-compat.cpp in
github.com/ollama/ollama, at fb30760).
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.files import megabytes
from paceline.storage.gguf_file import GgufFile, short
from paceline.storage.progress import Progress
from paceline.storage.system import memory_bytes

FAMILIES = (
    *("exaone4", "gemma", "gemma3", "gemma4", "glm4moe", "gpt-oss", "hunyuan-dense", "lfm2"),
    "lfm2moe",
    *("llama", "minicpm", "mistral3", "olmoe", "phi3", "qwen2", "qwen3", "qwen35", "qwen3moe"),
    *("qwen35moe", "smollm3"),
)
"""`general.architecture` of the families that tests/conformance/test_gguf_families.py proves."""

WITH_LLAMACPP = ("glm4",)
"""Other families that tests/engines/test_llamacpp_families.py proves in the engine llamacpp.

ik_llama.cpp 0.1.5 opens more, but granite without its residual scale, and the rows of gemma2 differ
(2026-11-25).
"""

_LEAVE_OUT = ("qwen35", "qwen35moe")
"""Families whose layers that predict the tokens after the next are left out of the graph."""

WEIGHTS = (
    *("F32", "F16", "BF16", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"),
)
"""Types of weights that are kept as they are."""

_POSITIVE = (
    *("block_count", "embedding_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "rope.dimension_count", "rope.freq_base"),
)

_UNPACKED_BYTES = 9
"""Memory that OpenVINO takes for a weight in MXFP4 while a model is compiled: it has them twice, in
32 bits. Measured with layers of gpt-oss 20B (2026-11-25)."""

_MOST_ROTATED = 1 << 16
"""Values of a head that are rotated; OpenVINO makes a table of them before it compares sizes."""

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

MEMORY_PER_BYTE = 3.2
"""Bytes of memory that a model takes at its peak, while it is loaded, per byte of its weights,
without the KV cache: 3.32 GB for a 1.7B model in Q4_0 of 1.05 GB
(benchmarks/results/calls-1.7b.json). The weights are copied when the graph is compiled, and packed
once more in the first call."""


def check_supported(path: Path, source: GgufFile) -> None:
    """Raise ModelError for a family, or a type of weights, that the openvino engine cannot run."""
    from gguf import GGMLQuantizationType

    family = source.fields.get("general.architecture")
    if family in (*FAMILIES, *RENAMED):
        check_layout(path, source)
    if family not in FAMILIES:
        raise ModelError(
            f"{path} has the architecture {short(repr(family))}; expected one of "
            f"{', '.join(FAMILIES)}. {instead_of(family)}"
        )
    for name in _POSITIVE:  # OpenVINO divides by these
        value = source.fields.get(f"{family}.{name}", 1)
        if isinstance(value, int | float) and not value > 0:
            raise ModelError(
                f"{path} has {family}.{name} of {value}; expected more than 0: fetch it again"
            )
    rotated = source.fields.get(f"{family}.rope.dimension_count", 0)
    if isinstance(rotated, int) and rotated > _MOST_ROTATED:
        raise ModelError(
            f"{path} has {family}.rope.dimension_count of {rotated}; expected at most "
            f"{_MOST_ROTATED}: fetch it again"
        )
    if family not in _LEAVE_OUT and source.fields.get(f"{family}.nextn_predict_layers"):
        raise ModelError(
            f"{path} has layers that predict the tokens after the next, which the openvino engine "
            "cannot leave out; its Hugging Face checkpoint works: give its folder or hub name"
        )
    kinds = {tensor.kind: tensor for tensor in source.tensors}
    names = {GGMLQuantizationType(kind).name: tensor for kind, tensor in kinds.items()}
    for name, tensor in names.items():
        if name not in WEIGHTS:
            raise ModelError(
                f"{path} has weights of type {name} ({short(tensor.name)}); expected "
                f"{', '.join(WEIGHTS)}: get the model in another quantization, such as Q4_K_M"
            )
    packed = (tensor for tensor in source.tensors if tensor.kind == GGMLQuantizationType.MXFP4)
    needed = _UNPACKED_BYTES * sum(prod(tensor.shape) for tensor in packed)
    if needed > memory_bytes():
        raise ModelError(
            f"{path} has weights in MXFP4, for which the engine openvino needs about "
            f"{megabytes(needed)} of memory, and this machine has {megabytes(memory_bytes())}; use "
            "--engine llamacpp, which takes little more than the file"
        )


def instead_of(family: object) -> str:
    """What to do with a model of another family, as a sentence."""
    if family in WITH_LLAMACPP:
        return (
            "`--engine llamacpp` runs a GGUF file of it, from the hub (owner/name:Q4_K_M) or this "
            "machine"
        )
    return "Take a model of one of these: `paceline models` lists some"


def check_layout(path: Path, file: GgufFile) -> None:
    """Raise ModelError, with what works instead, for a file in ollama's own layout.

    For files of families that run here, and those in `RENAMED`.
    """
    fields, family = file.fields, short(file.fields.get("general.architecture"))
    marks = _marks(family, fields)
    encoders = [tensor.name for tensor in file.tensors if tensor.name.startswith(_ENCODERS)]
    if encoders:
        marks = [f"the tensor {short(encoders[0])}", *marks]
    if marks:
        known = RENAMED.get(family, family)
        raise ModelError(
            f"{path} is in the layout of ollama's own converter, not in llama.cpp's (it has "
            f"{marks[0]}), so it does not run here; use a {known} file of the hub instead, such as "
            "those in `paceline models`"
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
    """Memory that weights of this many bytes need, about."""
    return int(weights * MEMORY_PER_BYTE)


def fits(weights: int) -> bool:
    """Whether weights of this many bytes fit."""
    return memory_needed(weights) <= memory_bytes()


def check_fits(
    name: str, weights: int, progress: Progress, advice: str = "", *, mapped: bool = False
) -> None:
    """Say so if weights of this many bytes are likely not to fit, before anything is read.

    `advice` is a further way out; `mapped`: whether the engine maps the file and copies nothing.
    Raises ModelError if the weights alone are larger than memory.
    """
    has = megabytes(memory_bytes())
    if weights > memory_bytes():
        raise ModelError(
            f"{name} has {megabytes(weights)}, and this machine has {has} of memory; choose a "
            f"smaller model or quantization{advice}"
        )
    if not mapped and not fits(weights):
        progress.say(
            f"{name} needs about {megabytes(memory_needed(weights))} of memory while it is loaded, "
            f"and this machine has {has}"
        )
