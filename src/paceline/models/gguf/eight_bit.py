"""Forms of a GGUF file with 8-bit weights: `int8` for the engine openvino, `q8_0` for llamacpp.

int8 is an OpenVINO model with one scale per output channel, for the default model: a small one is
fastest so (docs/decisions/gguf-weights.md). OpenVINO GenAI's GGUF reader builds the graph. It
rounds the offsets of asymmetric weights (Q4_1, Q4_K) to whole steps, so it gets the exact values as
f16, and these are then stored in 8 bits.

q8_0 is a GGUF file: ik_llama.cpp computes Q4_1, the type of the default model's file, wrong at some
widths (docs/decisions/row-classes.md). Q8_0 has 32 weights of 8 bits to an f16 scale: finer than
what it is made from, so it is the same model to about 1 part in 250 of a group's largest.
"""

import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.models.cache import disk_full
from paceline.models.gguf import dequantized, read, write_derived
from paceline.models.manifest import GGUF_WEIGHTS, GRAPH, WEIGHTS, Facts
from paceline.storage.gguf_file import GgufFile, Tensor, read_gguf, short, write_gguf
from paceline.storage.int8 import as_int8
from paceline.storage.openvino import core
from paceline.storage.processes import python, run_child
from paceline.storage.progress import Progress

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures that OpenVINO GenAI's reader supports."""

_FACTORS = "rope_freqs.weight"
"""Factors of positions, as in Llama 3.1."""
_NOT_READ = ("rope.scaling.type", "attention.sliding_window")
"""Fields that OpenVINO GenAI's reader ignores: with one of them a text's logits are wrong from its
first tokens, or from the window on (measured on tiny models, 2026-11-26)."""

_EXACT = "exact.gguf"
_BUILD_GRAPH = (
    "import sys, openvino_genai;"
    "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
)

_GROUP, _GROUP_BYTES = 32, 34
"""Weights of a group of Q8_0, and its bytes."""


def convert_gguf(path: Path, work: Path, progress: Progress) -> Facts:
    """Write graph, weights, tokenizer, chat template and settings of the GGUF file into `work`.

    Raises:
        ModelError: the file is damaged or of an unsupported kind.
        OSError: a file cannot be written.
    """
    source = read(path, progress)
    _check(path, source)
    facts = write_derived(path, source.fields, work)
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


def _check(path: Path, source: GgufFile) -> None:
    """Raise ModelError if OpenVINO GenAI's reader does not compute the model that the file has."""
    architecture = source.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path} has the architecture {short(repr(architecture))}; expected one of "
            f"{', '.join(ARCHITECTURES)}. Its Hugging Face checkpoint may work: "
            "`paceline convert FOLDER --to openvino`"
        )
    if ignored := _ignored(source, architecture):
        raise ModelError(
            f"{path} has {ignored}, which the conversion to int8 ignores; leave the form away to "
            "run the file as it is"
        )


def int8_bytes(path: Path) -> int:
    """Bytes that the weights of a GGUF file have in int8; raises ModelError if it has no int8."""
    source = read_gguf(path)
    _check(path, source)
    return sum(prod(tensor.shape) for tensor in source.tensors)


def _ignored(source: GgufFile, architecture: str) -> str:
    """What a file says of positions that OpenVINO GenAI's reader ignores; empty: nothing."""
    if any(tensor.name == _FACTORS for tensor in source.tensors):
        return f"the tensor {_FACTORS}"
    for name in _NOT_READ:
        value = source.fields.get(f"{architecture}.{name}")
        if value not in (None, 0, "none"):
            return f"{name}={short(repr(value))}"
    return ""


def peak_disk_bytes(gguf_bytes: int) -> int:
    """Disk bytes that converting needs, at most: f16 twice, from 4-bit weights."""
    return gguf_bytes * 8


def q8_peak_bytes(gguf_bytes: int) -> int:
    """Disk bytes of a file of Q4_1, 20 for a group, and of its Q8_0 form, at most."""
    return gguf_bytes + gguf_bytes * _GROUP_BYTES // 20


def _write_exact(path: Path, source: GgufFile, target: Path, progress: Progress) -> None:
    """Write the same model with f16 matrices, which the graph's reader does not round."""
    from gguf import GGMLQuantizationType

    # Norms and biases stay f32: they are small, and f32 in every file.
    halves = (int(GGMLQuantizationType.F16), np.dtype(np.float16))
    singles = (int(GGMLQuantizationType.F32), np.dtype(np.float32))
    dtypes = {
        tensor.name: singles if len(tensor.shape) == 1 else halves for tensor in source.tensors
    }

    def values(tensor: Tensor) -> npt.NDArray[Any]:
        stored: npt.NDArray[Any] = dequantized(path, tensor).astype(dtypes[tensor.name][1])
        return stored

    forms = {
        tensor.name: (kind, dtype.itemsize * prod(tensor.shape))
        for tensor in source.tensors
        for kind, dtype in (dtypes[tensor.name],)
    }
    total = sum(size for _, size in forms.values())
    with progress.task("reading weights", total) as update:
        write_gguf(target, source, forms, values, update)


def _build_graph(path: Path, exact: Path, progress: Progress) -> None:
    with progress.task(f"building the graph of {path.name}"):
        finished = run_child(python("-c", _BUILD_GRAPH, str(exact)))
    folder = exact.parent
    if finished.code == 0 and (folder / GRAPH).is_file() and (folder / WEIGHTS).is_file():
        return
    if finished.disk_full:
        raise disk_full()
    raise ModelError(f"{path} cannot be converted to OpenVINO: {finished.reason}")


def store_as_int8(source: Path, target: Path) -> None:
    """Read the graph `source`, replace its f16 weight matrices, write it to `target`.

    Raises OSError when `target` cannot be written.
    """
    import numpy as np
    import openvino as ov

    model = core().read_model(source)
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Convert":
            continue
        constant = node.input_value(0).get_node()
        if (
            constant.get_type_name() != "Constant"
            or constant.get_element_type() != ov.Type.f16
            or len(constant.get_output_shape(0)) != 2
        ):
            continue
        weight = constant.get_data().astype(np.float32)  # [out, in]
        node.output(0).replace(as_int8(weight).output(0))
    model.validate_nodes_and_infer_types()
    try:
        ov.save_model(model, target, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(f"cannot write {target}: {error}") from error


def write_q8(path: Path, work: Path, progress: Progress) -> Facts:
    """Write weights, tokenizer, chat template and settings of a GGUF file into `work`.

    Raises:
        ModelError: the file is damaged, or has weights that gguf-py cannot read.
        OSError: a file cannot be written.
    """
    from gguf import GGMLQuantizationType, quantize

    source = read(path, progress)
    facts = write_derived(path, source.fields, work)
    forms = {
        tensor.name: (int(GGMLQuantizationType.Q8_0), _q8_bytes(tensor))
        if _is_matrix(tensor)
        else (tensor.kind, tensor.data.nbytes)
        for tensor in source.tensors
    }

    def values(tensor: Tensor) -> npt.NDArray[Any]:
        if not _is_matrix(tensor):
            return tensor.data
        weights = dequantized(path, tensor)
        groups: npt.NDArray[Any] = quantize(weights, GGMLQuantizationType.Q8_0)
        return groups

    total = sum(size for _, size in forms.values())
    with progress.task("storing weights in 8 bits", total) as update:
        write_gguf(work / GGUF_WEIGHTS, source, forms, values, update)
    return facts


def _is_matrix(tensor: Tensor) -> bool:
    return len(tensor.shape) > 1 and tensor.shape[-1] % _GROUP == 0


def _q8_bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) // _GROUP * _GROUP_BYTES
