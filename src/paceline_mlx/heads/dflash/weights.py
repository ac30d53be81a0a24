"""Reads a DFlash checkpoint's weights into MLX: as stored, or quantized to 8 or 4 bits."""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

from paceline_mlx.heads.dflash.checkpoint import Config
from paceline_mlx.heads.parts import Matrix
from paceline_mlx.heads.tensors import StoredTensor
from paceline_mlx.hooks import Array


class Kernel(NamedTuple):
    """A convolution's weights; see `Convolution`."""

    base: Array
    """[2, taps, groups, channels of a group]"""
    projection: Matrix


class Layer(NamedTuple):
    """A layer's weights; keys and values, and gate and up, share a matrix."""

    input_norm: Array
    query: Matrix
    keys_values: Matrix
    query_norm: Array
    key_norm: Array
    output: Matrix
    post_norm: Array
    gate_up: Matrix
    down: Matrix
    attention_kernel: Kernel | None
    feed_forward_kernel: Kernel | None


def on_device(tensors: Mapping[str, StoredTensor]) -> dict[str, Array]:
    """The network's tensors, by name, as the dtype of `fc.weight`."""
    arrays = {name: tensor.load() for name, tensor in tensors.items()}
    return {name: array.astype(arrays["fc.weight"].dtype) for name, array in arrays.items()}


def layer_of(weights: Mapping[str, Array], at: int, config: Config, *, bits: int | None) -> Layer:
    """The weights of layer `at`."""

    def of(name: str) -> Array:
        return weights[f"layers.{at}.{name}.weight"]

    def matrix(*names: str) -> Matrix:
        return Matrix(mx.concatenate([of(name) for name in names]), bits)

    def kernel(name: str) -> Kernel | None:
        form = config.convolution
        if form is None:
            return None
        name = f"layers.{at}.{name}"
        base = weights[f"{name}.base_kernel"].reshape(2, form.taps, -1, form.group)
        return Kernel(base, Matrix(weights[f"{name}.kernel_projection.weight"], bits))

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
        attention_kernel=kernel("attention_conv"),
        feed_forward_kernel=kernel("mlp_conv"),
    )
