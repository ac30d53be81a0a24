"""Reads a DFlash checkpoint's weights into MLX: as stored, or quantized to 8 or 4 bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.drafters.dflash.checkpoint import Config, check_weights, weight_files
from paceline.errors import ModelError

MlxArray = Any
"""An `mlx.core.array`; lazy."""

_GROUPS = (64, 32)
"""Quantization group sizes, in columns; the first that divides a row is used."""


class Matrix:
    """A linear layer's weight [out, in]: quantized if `bits` is given and a group size fits."""

    def __init__(self, weight: MlxArray, bits: int | None) -> None:
        import mlx.core as mx

        self._bits = bits
        self._group = next((size for size in _GROUPS if weight.shape[1] % size == 0), None)
        self._parts = [weight]
        if bits is not None and self._group is not None:
            self._parts = list(mx.quantize(weight, group_size=self._group, bits=bits))
        mx.eval(self._parts)

    def __call__(self, rows: MlxArray) -> MlxArray:
        """[R, in] -> [R, out]."""
        import mlx.core as mx

        if len(self._parts) == 1:
            return rows @ self._parts[0].T
        return mx.quantized_matmul(rows, *self._parts, group_size=self._group, bits=self._bits)


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

    found: dict[str, MlxArray] = {}
    for path in weight_files(folder):
        try:
            tensors = mx.load(str(path))
            mx.eval(tensors)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{path} cannot be read: {reason}") from error
        for name, tensor in tensors.items():
            if tensor.dtype not in (mx.bfloat16, mx.float16, mx.float32):
                kind = str(tensor.dtype).removeprefix("mlx.core.")
                raise ModelError(f"{path}: {name} is {kind}, expected bfloat16, float16 or float32")
            found[name.removeprefix("model.")] = tensor
    check_weights(folder, config, found, lambda rows: bool(mx.isfinite(rows).all().item()))
    dtype = found["fc.weight"].dtype
    return {name: array.astype(dtype) for name, array in found.items()}


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
