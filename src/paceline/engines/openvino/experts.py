"""Products of rows with the matrices of the experts that every row has chosen."""

from typing import Any

import numpy as np

from paceline.engines.openvino.frontend_operations import (
    SIZE,
    SQUARE,
    VECTOR,
    Arrays,
    frontend_operations,
)

_A_LAYER = 3
"""Products of a layer: of gate, up and down."""


class ExpertProducts:
    """Operations GatherMatmul, one per product, taken from a tiny model."""

    def __init__(self, layers: int) -> None:
        """For `layers` layers of experts."""
        self._spare = iter(_operations(layers) if layers else ())

    def product(self, rows: Any, weights: Any, chosen: Any) -> Any:
        """Output [chosen, n, out] of rows [1 or chosen, n, in] and matrices [experts, out, in].

        `chosen` is [n, chosen] int32: numbers of experts.
        """
        operation = next(self._spare)
        bias = operation.input_value(3)
        operation.set_arguments([rows, weights, chosen, bias])
        operation.validate_and_infer_types()
        return operation.output(0)


def _operations(layers: int) -> list[Any]:
    """The GatherMatmuls of a tiny model that has `layers` layers of two experts."""
    fields = {
        **{"block_count": layers, "expert_count": 2, "expert_used_count": 1},
        "expert_feed_forward_length": SIZE,
    }
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        tensors.update(_layer(f"blk.{layer}."))
    operations = frontend_operations("GatherMatmul", "qwen3moe", fields, tensors)
    if len(operations) != _A_LAYER * layers:
        raise RuntimeError(
            f"expected {_A_LAYER} operations a layer, found {len(operations)} in all"
        )
    return operations


def _layer(prefix: str) -> Arrays:
    vectors = ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm")
    squares = ("attn_q", "attn_k", "attn_v", "attn_output")
    return {
        **{f"{prefix}{part}": VECTOR for part in vectors},
        **{f"{prefix}{part}": SQUARE for part in squares},
        f"{prefix}ffn_gate_inp": SQUARE[:2],
        **{f"{prefix}ffn_{part}_exps": np.stack([SQUARE] * 2) for part in ("gate", "up", "down")},
    }
