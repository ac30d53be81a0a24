"""A GGUF file made into an OpenVINO model, once, without changing what its weights say.

Knows GGUF's metadata and the way into OpenVINO: OpenVINO GenAI's own GGUF reader builds the graph.
That reader rounds the offsets of asymmetric weights (Q4_1, Q4_K) to whole steps, so it is given the
exact values as f16, and the graph's weights are then stored as 8 bits per channel
(docs/decisions/gguf-weights.md has what each way costs).
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.models.cache import disk_full
from paceline.models.generation_config import write_gguf_settings
from paceline.models.gguf_file import GgufFile, Tensor, read_gguf, write_gguf
from paceline.models.gguf_tokenizer import (
    REQUIRED_FIELDS,
    build_tokenizer,
    short,
    special_tokens,
    vocabulary_faults,
)
from paceline.models.hf_config import end_ids
from paceline.models.int8 import store_as_int8
from paceline.models.manifest import GRAPH, TEMPLATE, TOKENIZER, WEIGHTS, Facts
from paceline.models.processes import python, run_child
from paceline.models.progress import Progress

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""What OpenVINO GenAI's reader can build a graph of."""

_EXACT = "exact.gguf"
_BUILD_GRAPH = (
    "import sys, openvino_genai;"
    "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
)


def convert_gguf(path: Path, work: Path, progress: Progress) -> Facts:
    """Write graph, weights, tokenizer, chat template and settings of the GGUF file into `work`.

    Raises ModelError for a file that is not a whole GGUF model or of a kind not known here. OSError
    passes through.
    """
    found = _read(path, progress)
    architecture = found.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path} is a model of architecture {short(repr(architecture))}; GGUF files of "
            f"{', '.join(ARCHITECTURES)} can be used. Its Hugging Face form may work: "
            "`paceline convert FOLDER --to openvino`"
        )
    facts = _write_words(path, found.fields, work)
    exact = work / _EXACT
    _write_exact(path, found, exact, progress)
    _build_graph(path, exact, progress)
    exact.unlink()
    whole = work / "f16"
    whole.mkdir()
    for name in (GRAPH, WEIGHTS):
        (work / name).rename(whole / name)
    with progress.task(f"storing weights of {path.name} as 8 bits per channel"):
        store_as_int8(whole / GRAPH, work / GRAPH)
    for name in (GRAPH, WEIGHTS):
        (whole / name).unlink()
    whole.rmdir()
    return facts


def write_words(path: Path, work: Path, progress: Progress) -> Facts:
    """Write tokenizer, chat template and settings of a GGUF file into `work`.

    Its architecture may be any.

    Raises ModelError for a file that is not a whole GGUF model. OSError passes through.
    """
    return _write_words(path, _read(path, progress).fields, work)


def write_settings(path: Path, folder: Path, progress: Progress) -> None:
    """Write the settings of the GGUF file alone into `folder`.

    Raises ModelError for a file that is not a whole GGUF model. OSError passes through.
    """
    write_gguf_settings(_read(path, progress).fields, folder)


def room_needed(gguf_bytes: int) -> int:
    """Bytes that converting takes at its peak, at most about: f16 twice, from 4-bit weights."""
    return gguf_bytes * 8


def _read(path: Path, progress: Progress) -> GgufFile:
    with progress.task(f"reading {path.name}"):
        return read_gguf(path)


def _write_words(path: Path, fields: Mapping[str, Any], work: Path) -> Facts:
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
        raise ModelError(f"{path} has no {', '.join(missing)}: weights without a tokenizer?")
    if faults := vocabulary_faults(fields):
        raise ModelError(f"{path} has a tokenizer that cannot be used: {'; '.join(faults)}")
    if fields.get("split.count", 0) not in (0, 1):
        raise ModelError(f"{path} is one part of a split model; join the parts first")
    context = fields.get(f"{architecture}.context_length")
    if not isinstance(context, int) or context < 1:
        raise ModelError(
            f"{path} does not say its context length ({short(architecture)}.context_length)"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    special = special_tokens(fields)
    bos, eos = (_id(fields, name, len(tokens)) for name in ("bos", "eos"))
    stops = end_ids(special) | ({eos} if eos is not None else set())
    for name in ("eot", "eom"):
        if (found := _id(fields, name, len(tokens))) is not None:
            stops.add(found)
    return Facts(
        context_length=context,
        stop_token_ids=tuple(sorted(stops)),
        bos_token_id=bos,
        add_bos=bool(fields.get("tokenizer.ggml.add_bos_token", False)) and bos is not None,
        bos_token=tokens[bos] if bos is not None else None,
        eos_token=tokens[eos] if eos is not None else None,
        license=words if isinstance(words := fields.get("general.license"), str) else None,
    )


def _id(fields: Mapping[str, Any], name: str, size: int) -> int | None:
    value = fields.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < size else None


def _write_exact(path: Path, found: GgufFile, target: Path, progress: Progress) -> None:
    """Write the same model with its matrices as f16: no block format is left to be read wrongly."""
    from gguf import GGMLQuantizationType, dequantize

    # Norms and biases stay f32: they are few, and f32 in every file.
    halves = (int(GGMLQuantizationType.F16), np.dtype(np.float16))
    singles = (int(GGMLQuantizationType.F32), np.dtype(np.float32))
    dtypes = {each.name: singles if len(each.shape) == 1 else halves for each in found.tensors}

    def values(tensor: Tensor) -> npt.NDArray[Any]:
        kind = GGMLQuantizationType(tensor.kind)
        try:
            exact = dequantize(tensor.data, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{path} has weights of type {kind.name}, which cannot be read; "
                "get the model in another form, such as Q8_0 or Q4_K_M"
            ) from error
        stored: npt.NDArray[Any] = exact.astype(dtypes[tensor.name][1])
        return stored

    total = sum(dtypes[each.name][1].itemsize * prod(each.shape) for each in found.tensors)
    with progress.task("reading weights", total) as reach:
        write_gguf(target, found, dtypes, values, reach)


def _build_graph(path: Path, exact: Path, progress: Progress) -> None:
    with progress.task(f"building the graph of {path.name}"):
        finished = run_child(python("-c", _BUILD_GRAPH, str(exact)))
    folder = exact.parent
    if finished.code == 0 and (folder / GRAPH).is_file() and (folder / WEIGHTS).is_file():
        return
    if finished.disk_full:
        raise disk_full()
    raise ModelError(f"{path} cannot be made into an OpenVINO model: {finished.reason}")
