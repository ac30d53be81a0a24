"""Operations that only OpenVINO's GGUF frontend makes, for graphs that are built here.

The frontend reads a tiny file of a family whose graph has them; they are then taken out of that
graph and get their real inputs.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.storage.gguf import read_gguf_graph

Arrays = Mapping[str, npt.NDArray[np.float32]]

SIZE = 32
"""Width of the tiny model, and its number of tokens."""
VECTOR = np.ones(SIZE, np.float32)
SQUARE = np.ones((SIZE, SIZE), np.float32)


def frontend_operations(
    kind: str, arch: str, fields: Mapping[str, int], tensors: Arrays
) -> list[Any]:
    """The operations of a `kind` in a tiny model.

    Args:
        kind: name of the operation.
        arch: family of the model, as GGUF names it.
        fields: metadata beside that of any model, without the family.
        tensors: of its layers, without `.weight` where they end in it.

    Raises RuntimeError if this OpenVINO makes none.
    """
    with TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "tiny.gguf"
        _write(path, arch, fields, tensors)
        graph = read_gguf_graph(path)
    operations = [node for node in graph.get_ordered_ops() if node.get_type_name() == kind]
    if not operations:
        raise RuntimeError(f"this OpenVINO made no {kind}; paceline needs OpenVINO 2026.4")
    return operations


def _write(path: Path, arch: str, fields: Mapping[str, int], tensors: Arrays) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, arch)
    for key, value in {
        **{"context_length": SIZE, "embedding_length": SIZE, "feed_forward_length": SIZE},
        **{"attention.head_count": 1, "attention.head_count_kv": 1, "vocab_size": SIZE},
        **{"attention.key_length": SIZE, "attention.value_length": SIZE},
        **{"rope.dimension_count": SIZE, **fields},
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 1e4)
    writer.add_uint32("general.file_type", 0)
    writer.add_string("tokenizer.ggml.model", "none")
    around = {"token_embd": SQUARE, "output": SQUARE, "output_norm": VECTOR}
    for name, values in {**around, **tensors}.items():
        writer.add_tensor(name if name.endswith((".bias", "ssm_a")) else f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
