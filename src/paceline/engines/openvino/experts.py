"""Products of rows with the matrices of the experts that each row has chosen.

Only OpenVINO's GGUF frontend makes this operation, GatherMatmul. So it reads a tiny file with as
many experts' layers as are needed; each operation is taken out of that graph and gets its real
inputs.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from paceline.storage.gguf import read_gguf_graph

_ARCH = "qwen3moe"
_SIZE = 32
_OPERATION = "GatherMatmul"
_A_LAYER = 3
"""Operations of a layer: of gate, up and down."""


class ExpertProducts:
    """A supply of operations."""

    def __init__(self, layers: int) -> None:
        """For `layers` layers of experts."""
        self._spare = _operations(layers) if layers else iter(())

    def product(self, rows: Any, weights: Any, chosen: Any) -> Any:
        """Output [chosen, n, out] of rows [1 or chosen, n, in] and matrices [experts, out, in].

        `chosen` is [n, chosen] int32: numbers of experts.
        """
        operation = next(self._spare)
        bias = operation.input_value(3)
        operation.set_arguments([rows, weights, chosen, bias])
        operation.validate_and_infer_types()
        return operation.output(0)


def _operations(layers: int) -> Iterator[Any]:
    with TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "experts.gguf"
        _write(path, layers)
        graph = read_gguf_graph(path)
    found = [node for node in graph.get_ordered_ops() if node.get_type_name() == _OPERATION]
    if len(found) != _A_LAYER * layers:
        raise RuntimeError(f"this OpenVINO made no {_OPERATION}; paceline needs OpenVINO 2026.4")
    return iter(found)


def _write(path: Path, layers: int) -> None:
    """Write a model of no use, with `layers` layers of two experts."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, _ARCH)
    for key, value in {
        **{"block_count": layers, "context_length": _SIZE, "embedding_length": _SIZE},
        **{"feed_forward_length": _SIZE, "expert_feed_forward_length": _SIZE},
        **{"attention.head_count": 1, "attention.head_count_kv": 1, "vocab_size": _SIZE},
        **{"attention.key_length": _SIZE, "attention.value_length": _SIZE},
        **{"expert_count": 2, "expert_used_count": 1, "rope.dimension_count": _SIZE},
    }.items():
        writer.add_uint32(f"{_ARCH}.{key}", value)
    writer.add_float32(f"{_ARCH}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{_ARCH}.rope.freq_base", 1e4)
    writer.add_uint32("general.file_type", 0)
    writer.add_string("tokenizer.ggml.model", "none")
    vector, square = np.ones(_SIZE, np.float32), np.ones((_SIZE, _SIZE), np.float32)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", square)
    writer.add_tensor("output_norm.weight", vector)
    for layer in range(layers):
        for part in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", vector)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", square)
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", square[:2])
        for part in ("gate", "up", "down"):
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.stack([square] * 2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
