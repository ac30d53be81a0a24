"""Reads a head's safetensors files, and copies its weights to the device.

Files are untrusted: the safetensors library checks the header against the file size, and any fault
raises ModelError. Values are read on first use, so a head may be inside a large model's files.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ModelError
from paceline_mlx.hooks import Array

Matrix = Callable[[Array], Array]
"""A linear layer, [R, in] -> [R, out]; its weights are [out, in]."""

_GROUPS = (64, 32)
"""Quantization group sizes, in columns; the first that divides the row length is used."""


def stored_tensors(folder: Path) -> dict[str, Array]:
    """Return the tensors of all safetensors files in a folder, by name, not evaluated.

    Raises ModelError if there are no such files, or if one is truncated.
    """
    import mlx.core as mx
    from safetensors import SafetensorError, safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} has no .safetensors file; expected a checkpoint")
    tensors: dict[str, Any] = {}
    for path in paths:
        try:
            with safe_open(path, framework="numpy"):  # MLX does not detect truncated files
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
        try:
            tensors |= mx.load(str(path))
        except RuntimeError as error:  # a tensor has a type that MLX lacks
            raise ModelError(f"{path} cannot be read by MLX: {error}") from error
    return tensors


def check_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Array],
    *,
    finite: bool = True,
) -> None:
    """Check names, shapes and types of tensors and, if `finite`, their values.

    Raises ModelError with the first five faults and the number of others.
    """
    faults = [
        f"{name} {fault}"
        for name, shape in shapes.items()
        if (fault := _fault(tensors.get(name), shape, finite=finite))
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ModelError(f"the weights in {path} cannot be used: {'; '.join(faults[:5])}{more}")


def _fault(tensor: Array | None, shape: tuple[int, ...], *, finite: bool) -> str | None:
    if tensor is None:
        return "is missing"
    if tensor.shape != shape:
        return f"is {list(tensor.shape)}, expected {list(shape)}"
    if str(tensor.dtype).rpartition(".")[2] not in ("bfloat16", "float16", "float32"):
        return f"has type {tensor.dtype}, expected bfloat16, float16 or float32"
    if finite and not (tensor - tensor == 0).all():  # in MLX or torch
        return "has values that are not finite"
    return None


class LayerWeights(NamedTuple):
    """A decoder layer's weights. Keys and values share a matrix, as do gate and up."""

    input_norm: Array
    query: Matrix
    gate: Matrix | None
    """Its sigmoid multiplies attention's output (Qwen3.5)."""
    keys_values: Matrix
    query_norm: Array | None
    key_norm: Array | None
    output: Matrix
    post_norm: Array
    gate_up: Matrix
    down: Matrix


class Weights:
    """Tensors by name, in one dtype; matrices are quantized to `bits` where a group size fits."""

    def __init__(self, tensors: Mapping[str, Array], dtype: Any, bits: int | None) -> None:
        self._tensors, self._dtype, self._bits = tensors, dtype, bits

    def vector(self, name: str) -> Array:
        return self._tensors[f"{name}.weight"].astype(self._dtype)

    def matrix(self, *names: str) -> Matrix:
        """Concatenate tensors [out, in] into one matrix."""
        import mlx.core as mx

        return self._put(mx.concatenate([self.vector(name) for name in names]))

    def layer(self, name: str, *, gated_heads: int | None = None) -> LayerWeights:
        """Return a decoder layer whose tensor names are `name` plus Hugging Face's names.

        `gated_heads`: number of attention heads, if gate rows follow each head's query rows.
        """
        query = self.vector(f"{name}self_attn.q_proj")
        gate = None
        if gated_heads is not None:
            pairs = query.reshape(gated_heads, 2, -1, query.shape[1])
            query, gate = (pairs[:, part].reshape(-1, query.shape[1]) for part in (0, 1))
        query_norm = key_norm = None
        if f"{name}self_attn.q_norm.weight" in self._tensors:
            query_norm, key_norm = (self.vector(f"{name}self_attn.{part}_norm") for part in "qk")
        return LayerWeights(
            input_norm=self.vector(f"{name}input_layernorm"),
            query=self._put(query),
            gate=None if gate is None else self._put(gate),
            keys_values=self.matrix(f"{name}self_attn.k_proj", f"{name}self_attn.v_proj"),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self.matrix(f"{name}self_attn.o_proj"),
            post_norm=self.vector(f"{name}post_attention_layernorm"),
            gate_up=self.matrix(f"{name}mlp.gate_proj", f"{name}mlp.up_proj"),
            down=self.matrix(f"{name}mlp.down_proj"),
        )

    def _put(self, weight: Array) -> Matrix:
        import mlx.core as mx
        from mlx import nn

        linear: Any = nn.Linear(1, 1, bias=False)
        linear.weight = weight
        group = next((size for size in _GROUPS if weight.shape[1] % size == 0), None)
        if self._bits is not None and group is not None:
            linear = linear.to_quantized(group, self._bits)
        mx.eval(linear.parameters())
        put: Matrix = linear
        return put
