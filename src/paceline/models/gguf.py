"""Converts a GGUF file to an OpenVINO model, keeping the values of its weights.

OpenVINO GenAI's GGUF reader builds the graph. It rounds the offsets of asymmetric weights (Q4_1,
Q4_K) to whole steps, so it gets the exact values as f16; the graph's weights are then stored as
8 bits per channel. docs/decisions/gguf-weights.md compares the alternatives.
"""

import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.models.cache import disk_full
from paceline.models.generation_config import write_gguf_settings
from paceline.models.gguf_file import GgufFile, Tensor, read_gguf, short, write_gguf
from paceline.models.gguf_tokenizer import (
    REQUIRED_FIELDS,
    build_tokenizer,
    token_facts,
    vocabulary_faults,
)
from paceline.models.int8 import store_as_int8
from paceline.models.manifest import GRAPH, TEMPLATE, TOKENIZER, WEIGHTS, Facts
from paceline.models.processes import python, run_child
from paceline.models.progress import Progress

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures that OpenVINO GenAI's reader supports."""

_EXACT = "exact.gguf"
_BUILD_GRAPH = (
    "import sys, openvino_genai;"
    "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
)


def convert_gguf(path: Path, work: Path, progress: Progress) -> Facts:
    """Write graph, weights, tokenizer, chat template and settings of the GGUF file into `work`.

    Raises:
        ModelError: the file is damaged or of an unsupported kind.
        OSError: a file cannot be written.
    """
    source = _read(path, progress)
    architecture = source.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path} has the architecture {short(repr(architecture))}; expected one of "
            f"{', '.join(ARCHITECTURES)}. Its Hugging Face checkpoint may work: "
            "`paceline convert FOLDER --to openvino`"
        )
    facts = _write_tokenizer(path, source.fields, work)
    exact = work / _EXACT
    _write_exact(path, source, exact, progress)
    _build_graph(path, exact, progress)
    exact.unlink()
    f16 = work / "f16"
    f16.mkdir()
    for name in (GRAPH, WEIGHTS):
        (work / name).rename(f16 / name)
    with progress.task(f"storing weights of {path.name} as 8 bits per channel"):
        store_as_int8(f16 / GRAPH, work / GRAPH)
    shutil.rmtree(f16)
    return facts


def write_tokenizer(path: Path, work: Path, progress: Progress) -> Facts:
    """Write tokenizer, chat template and settings of a GGUF file of any architecture into `work`.

    Raises ModelError for a damaged file, and OSError.
    """
    return _write_tokenizer(path, _read(path, progress).fields, work)


def write_settings(path: Path, folder: Path, progress: Progress) -> None:
    """Write only the settings of the GGUF file into `folder`. Raises ModelError and OSError."""
    write_gguf_settings(_read(path, progress).fields, folder)


def peak_disk_bytes(gguf_bytes: int) -> int:
    """Disk bytes that converting needs, at most: f16 twice, from 4-bit weights."""
    return gguf_bytes * 8


def _read(path: Path, progress: Progress) -> GgufFile:
    with progress.task(f"reading {path.name}"):
        return read_gguf(path)


def _write_tokenizer(path: Path, fields: Mapping[str, Any], work: Path) -> Facts:
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
    return Facts(
        **token_facts(fields)._asdict(),
        context_length=context,
        license=text if isinstance(text := fields.get("general.license"), str) else None,
    )


def _write_exact(path: Path, source: GgufFile, target: Path, progress: Progress) -> None:
    """Write the same model with f16 matrices, which the graph's reader does not round."""
    from gguf import GGMLQuantizationType, dequantize

    # Norms and biases stay f32: they are small, and f32 in every file.
    halves = (int(GGMLQuantizationType.F16), np.dtype(np.float16))
    singles = (int(GGMLQuantizationType.F32), np.dtype(np.float32))
    dtypes = {each.name: singles if len(each.shape) == 1 else halves for each in source.tensors}

    def values(tensor: Tensor) -> npt.NDArray[Any]:
        kind = GGMLQuantizationType(tensor.kind)
        try:
            exact = dequantize(tensor.data, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{path} has weights of type {kind.name}, which cannot be read; "
                "get the model in another quantization, such as Q8_0 or Q4_K_M"
            ) from error
        stored: npt.NDArray[Any] = exact.astype(dtypes[tensor.name][1])
        return stored

    total = sum(dtypes[each.name][1].itemsize * prod(each.shape) for each in source.tensors)
    with progress.task("reading weights", total) as update:
        write_gguf(target, source, dtypes, values, update)


def _build_graph(path: Path, exact: Path, progress: Progress) -> None:
    with progress.task(f"building the graph of {path.name}"):
        finished = run_child(python("-c", _BUILD_GRAPH, str(exact)))
    folder = exact.parent
    if finished.code == 0 and (folder / GRAPH).is_file() and (folder / WEIGHTS).is_file():
        return
    if finished.disk_full:
        raise disk_full()
    raise ModelError(f"{path} cannot be converted to OpenVINO: {finished.reason}")
