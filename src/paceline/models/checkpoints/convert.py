"""Converts a Hugging Face checkpoint to a GGUF file, tensor by tensor, without torch.

`plan` checks a checkpoint whole; `write` makes the file, `write_folder` a model folder with it.
`families.py` has a row for each family. Memory is bounded: a few pieces of tensors at once.

Invariant: what can be wrong with a checkpoint is found by `plan`, before the first byte is written.
"""

import math
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest
from paceline.models.checkpoints import check_complete, read_facts
from paceline.models.checkpoints.families import family_of
from paceline.models.checkpoints.layout import outputs, plain_name
from paceline.models.checkpoints.metadata import Factors, metadata, rope_factors
from paceline.models.checkpoints.model import Config, Value, read_sizes
from paceline.models.checkpoints.tensors import Form, Output, Shards
from paceline.models.manifest import GENERATION, GGUF_WEIGHTS, TEMPLATE, TOKENIZER, Facts
from paceline.storage.progress import Progress

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

WEIGHTS = {
    "int8": ("Q8_0", "Q8_0"),
    "int4": ("Q4_0", "Q8_0"),
    "f16": ("F16", "F16"),
    "f32": ("F32", "F32"),
}
"""Weights form -> GGUF types of matrices, and of embeddings and the head."""

_KEPT = (
    *("config.json", GENERATION, TOKENIZER, "tokenizer_config.json"),
    *(TEMPLATE, "chat_template.json"),
)
"""Files about text, which are copied beside the GGUF file."""

_ALIGNMENT = 32
_WORKERS = 4
"""Pieces in work at once; numpy leaves the interpreter free while it computes."""


@dataclass(frozen=True)
class Plan:
    """A conversion, checked and not yet made."""

    arch: str
    fields: Mapping[str, Value]
    outputs: list[tuple[Output, "GGMLQuantizationType"]]
    factors: list[Factors]
    shards: Shards

    @property
    def size(self) -> int:
        """Bytes of the file, about."""
        return sum(_byte_count(output.shape, kind) for output, kind in self.outputs)


def plan(folder: Path, weights: str) -> Plan:
    """Plan the conversion of the checkpoint in `folder`.

    Args:
        folder: config.json, tokenizer.json and safetensors.
        weights: a key of `WEIGHTS`.

    Raises:
        InvalidRequest: the weights form is unknown.
        ModelError: the family is unknown, or files or tensors are missing, truncated or unexpected.
    """
    if weights not in WEIGHTS:
        raise InvalidRequest(f"weights is {weights!r}; expected one of {', '.join(WEIGHTS)}")
    check_complete(folder)
    config = Config(folder / "config.json")
    family = family_of(config)
    sizes = read_sizes(config, family)
    fields = metadata(config, family, sizes)
    shards = Shards(folder, plain_name)
    tensors = outputs(config, family, sizes, shards)
    if any(".nextn." in output.name for output in tensors):  # block_count has its layer, too
        fields[f"{family.arch}.block_count"] = len(sizes.layers) + 1
        fields[f"{family.arch}.nextn_predict_layers"] = 1
    # Most weights are experts in MXFP4 then: 4 bits for the few others would save little.
    has_mxfp4 = any(output.form is Form.MXFP4 for output in tensors)
    form = "int8" if weights == "int4" and has_mxfp4 else weights
    kinds = [(output, _kind(output, form)) for output in tensors]
    general: dict[str, Value] = {
        "general.type": "model",
        "general.file_type": _file_type(form),
        "general.quantization_version": 2,
        # The tokenizer is in tokenizer.json, beside the file.
        "tokenizer.ggml.model": "none",
    }
    return Plan(family.arch, {**general, **fields}, kinds, rope_factors(config, sizes), shards)


def write(plan: Plan, path: Path, update: Callable[[int], object]) -> None:
    """Write the file. Calls `update` with the bytes written so far. Raises OSError."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, plan.arch)
    for key, value in plan.fields.items():
        _add(writer, key, value)
    for factors in plan.factors:
        writer.add_tensor_info(
            factors.name, factors.values.shape, np.float32, factors.values.nbytes
        )
    for output, kind in plan.outputs:
        size = _byte_count(output.shape, kind)
        writer.add_tensor_info(output.name, output.shape, np.float16, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % _ALIGNMENT))
        for data in _tensors(plan):
            for piece in data:
                file.write(np.ascontiguousarray(piece).data)
                update(file.tell())
            file.write(bytes(-file.tell() % _ALIGNMENT))


def write_folder(plan: Plan, work: Path, progress: Progress) -> Facts:
    """Write the GGUF file into `work`, and copy what is read of a model beside its weights.

    Raises ModelError for an unreadable tokenizer or configuration, before anything is written, and
    OSError.
    """
    folder = plan.shards.folder
    facts = read_facts(folder)
    with progress.task(f"converting {folder.name} to GGUF", plan.size) as update:
        write(plan, work / GGUF_WEIGHTS, update)
    for name in _KEPT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, work / name)
    return facts


def _tensors(plan: Plan) -> Iterator[Iterable[npt.NDArray[Any]]]:
    """The data of each tensor, in pieces, in the order of the file."""
    for factors in plan.factors:
        yield [factors.values]
    with ThreadPoolExecutor(_WORKERS) as pool:
        for output, kind in plan.outputs:
            yield _in_order(pool, kind, output.pieces(plan.shards))


def _in_order(
    pool: ThreadPoolExecutor, kind: "GGMLQuantizationType", pieces: Iterable[npt.NDArray[Any]]
) -> Iterator[npt.NDArray[Any]]:
    """Quantize pieces, several at once; never more of them in memory than workers."""
    waiting: deque[Future[npt.NDArray[Any]]] = deque()
    for piece in pieces:
        waiting.append(pool.submit(_quantized, piece, kind))
        if len(waiting) == _WORKERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _quantized(values: npt.NDArray[Any], kind: "GGMLQuantizationType") -> npt.NDArray[Any]:
    from gguf.quants import quantize

    if values.dtype == np.uint8:  # blocks of MXFP4 stay as they are
        return values
    blocks: npt.NDArray[Any] = quantize(values, kind)
    return blocks


def _kind(output: Output, weights: str) -> "GGMLQuantizationType":
    """GGUF type of a tensor. Rows that no block divides stay in f16."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    matrix, table = WEIGHTS[weights]
    forms = {Form.MATRIX: matrix, Form.TABLE: table, Form.PLAIN: "F32", Form.MXFP4: "MXFP4"}
    kind = GGMLQuantizationType[forms[output.form]]
    block, _ = GGML_QUANT_SIZES[kind]
    return kind if output.shape[-1] % block == 0 else GGMLQuantizationType.F16


def _byte_count(shape: tuple[int, ...], kind: "GGMLQuantizationType") -> int:
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // int(block) * int(size)


def _file_type(weights: str) -> int:
    from gguf import LlamaFileType

    kind = WEIGHTS[weights][0]
    return int(LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])


def _add(writer: Any, key: str, value: Value) -> None:
    """Add a field of the type that readers expect: counts unsigned, other numbers float32."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
