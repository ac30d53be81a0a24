"""Reads a DFlash checkpoint's weights into MLX: as stored, or quantized to 8 or 4 bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.drafters.dflash.checkpoint import Config, read_tensors
from paceline.drafters.networks.mlx import Matrix, MlxArray


class Layer(NamedTuple):
    """A layer's weights; keys and values, and gate and up, are one matrix each."""

    input_norm: MlxArray
    query: Matrix
    keys_values: Matrix
    query_norm: MlxArray
    key_norm: MlxArray
    output: Matrix
    post_norm: MlxArray
    gate_up: Matrix
    down: Matrix


def read_weights(folder: Path, config: Config) -> dict[str, MlxArray]:
    """Read all tensors, by name, as the dtype of `fc.weight`.

    Raises ModelError if a file cannot be read, or tensors are missing or of another shape or dtype;
    the message names them.
    """
    import mlx.core as mx

    stored = read_tensors(folder, config)
    dtypes = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
    dtype = dtypes[stored["fc.weight"].dtype]
    return {name: mx.array(tensor.floats()).astype(dtype) for name, tensor in stored.items()}


def layer_of(weights: Mapping[str, MlxArray], at: int, *, bits: int | None) -> Layer:
    """The weights of layer `at`."""
    import mlx.core as mx

    def of(name: str) -> MlxArray:
        return weights[f"layers.{at}.{name}.weight"]

    def matrix(*names: str) -> Matrix:
        return Matrix(mx.concatenate([of(name) for name in names]), bits)

    return Layer(
        input_norm=of("input_layernorm"),
        query=matrix("self_attn.q_proj"),
        keys_values=matrix("self_attn.k_proj", "self_attn.v_proj"),
        query_norm=of("self_attn.q_norm"),
        key_norm=of("self_attn.k_norm"),
        output=matrix("self_attn.o_proj"),
        post_norm=of("post_attention_layernorm"),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
        down=matrix("mlp.down_proj"),
    )
