"""Derives from a GGUF file's metadata what is not in its graph: tokenizer, template, settings.

Refuses files that OpenVINO's GGUF frontend does not read, before anything is made of them.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.models.generation_config import write_gguf_settings
from paceline.models.gguf_tokenizer import (
    REQUIRED_FIELDS,
    build_tokenizer,
    token_facts,
    vocabulary_faults,
)
from paceline.models.manifest import TEMPLATE, TOKENIZER, Facts
from paceline.models.other_layouts import RENAMED, check_layout
from paceline.models.pooling import pooling_facts
from paceline.models.progress import Progress
from paceline.storage.files import megabytes
from paceline.storage.gguf_file import GgufFile, read_gguf, short
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

_SCALINGS = ("linear", "longrope", "none", "yarn")
"""Scalings of positions that files have. llama.cpp's libraries end the process at another name."""

_UNPACKED_BYTES = 9
"""Memory that OpenVINO takes for a weight in MXFP4 while a model is compiled: it has them twice, in
32 bits. Measured with layers of gpt-oss 20B (2026-11-25)."""

_MOST_ROTATED = 1 << 16
"""Values of a head that are rotated; OpenVINO makes a table of them before it compares sizes."""


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
    for name in _POSITIVE:  # of which OpenVINO divides
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


def write_tokenizer(path: Path, work: Path, progress: Progress) -> Facts:
    """Write tokenizer, chat template and settings of a GGUF file of any architecture into `work`.

    Raises ModelError for a damaged file, and OSError.
    """
    return write_derived(path, read(path, progress).fields, work)


def read(path: Path, progress: Progress) -> GgufFile:
    """Read a GGUF file's metadata. Raises ModelError for a damaged file."""
    with progress.task(f"reading {path.name}"):
        return read_gguf(path)


def write_derived(path: Path, fields: Mapping[str, Any], work: Path) -> Facts:
    """Like `write_tokenizer`, of metadata that was read already."""
    facts = _facts(path, fields)
    tokenizer = build_tokenizer(path, fields)
    (work / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        (work / TEMPLATE).write_text(template, encoding="utf-8")
    write_gguf_settings(fields, work)
    return facts


def _facts(path: Path, fields: Mapping[str, Any]) -> Facts:
    architecture = fields.get("general.architecture")
    missing = [key for key in REQUIRED_FIELDS if key not in fields]
    if missing:
        raise ModelError(f"{path} has no tokenizer: {', '.join(missing)} missing")
    if faults := vocabulary_faults(fields):
        raise ModelError(f"{path} has an invalid tokenizer: {'; '.join(faults)}")
    if fields.get("split.count", 0) not in (0, 1):
        raise ModelError(f"{path} is one part of a split model; join the parts first")
    context = fields.get(f"{architecture}.context_length")
    if not isinstance(context, int) or context < 1:
        raise ModelError(f"{path} has no context length ({short(architecture)}.context_length)")
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in _SCALINGS:
        raise ModelError(
            f"{path} has {short(architecture)}.rope.scaling.type of {short(repr(scaling))}; "
            f"expected one of {', '.join(_SCALINGS)}: get the model as another file"
        )
    return Facts(
        **token_facts(fields)._asdict(),
        context_length=context,
        license=text if isinstance(text := fields.get("general.license"), str) else None,
        **pooling_facts(fields),
    )
