"""What the networks of all heads share: the target's ends, a decoder layer's parts, and costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paceline.decoding.types import tap_name
from paceline.drafters.heads import DraftCost, check_fits
from paceline.drafters.sizes import Sizes
from paceline_mlx.heads.cache import evaluate
from paceline_mlx.heads.config import HeadConfig
from paceline_mlx.heads.weights import LayerWeights, Matrix
from paceline_mlx.hooks import Array
from paceline_mlx.model import LoadedModel


class HeadNetwork:
    """A head opened for a target. Not thread-safe."""

    config: HeadConfig
    dtype: Any

    def __init__(self, folder: Path, config: HeadConfig, target: LoadedModel) -> None:
        """Check that the head in `folder` fits its target.

        Raises ModelError: the message names every size that differs.
        """
        embedded = target.embed(mx.array([0]))  # lazy: only its shape and dtype are used
        vocabulary = target.head(embedded).shape[-1]
        check_fits(
            folder, config.facts("", ""), Sizes("", target.layers, embedded.shape[-1], vocabulary)
        )
        self.config = config
        self.taps = config.taps
        self._target_dtype = embedded.dtype
        self._target = target
        self._rotary_dims = config.head_dim
        self._periods: Array | None = None
        """Inverses of RoPE's frequencies; None: MLX computes those of plain RoPE itself."""
        if (rope := config.llama3_rope) is not None:
            self._periods = mx.array(rope.periods(config.head_dim, config.rope_theta))
        self.cost = DraftCost()

    def tapped(self, taps: Mapping[str, npt.NDArray[np.float32]], rows: int) -> Array:
        """Hidden states of a call's first `rows` rows, [rows, taps * d], evaluated.

        Taken from `taps.arrays` (layer -> array on the device) where the engine has it. They stay
        valid when the engine runs its next call.
        """
        arrays = getattr(taps, "arrays", None)
        if arrays is None:
            arrays = {layer: mx.array(taps[tap_name(layer)]) for layer in self.taps}
        tapped = mx.concatenate([arrays[layer][:rows] for layer in self.taps], axis=1)
        return evaluate(tapped.astype(self.dtype))

    def _embed(self, tokens: Array) -> Array:
        """[R] -> [R, d]."""
        return self._target.embed(tokens).astype(self.dtype)

    def _norm(self, rows: Array, weight: Array) -> Array:
        return mx.fast.rms_norm(rows, weight, self.config.rms_norm_eps)

    def _queries(self, layer: LayerWeights, rows: Array, position: int) -> Array:
        """[R, d] -> [1, heads, R, head_dim], rotated to positions from `position` on."""
        return self._rotated(self._heads(layer.query(rows)), layer.query_norm, position)

    def _keys_values(self, layer: LayerWeights, rows: Array, position: int) -> tuple[Array, Array]:
        """[R, d] -> keys, rotated to positions from `position` on, and values.

        Both are [1, kv_heads, R, head_dim].
        """
        keys, values = mx.split(self._heads(layer.keys_values(rows)), 2, axis=1)
        return self._rotated(keys, layer.key_norm, position), values

    def _heads(self, rows: Array) -> Array:
        """[R, heads * head_dim] -> [1, heads, R, head_dim]."""
        return rows.reshape(len(rows), -1, self.config.head_dim).swapaxes(0, 1)[None]

    def _rotated(self, heads: Array, norm: Array | None, position: int) -> Array:
        if norm is not None:
            heads = self._norm(heads, norm)
        return mx.fast.rope(
            heads,
            self._rotary_dims,
            traditional=False,
            base=None if self._periods is not None else self.config.rope_theta,
            scale=1.0,
            offset=position,
            freqs=self._periods,
        )

    def _attended(self, queries: Array, keys: Array, values: Array, mask: Any) -> Array:
        """[R, heads * head_dim]."""
        scale = self.config.head_dim**-0.5
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask
        )
        return attended[0].swapaxes(0, 1).reshape(queries.shape[2], -1)


def swiglu(gate_up: Matrix, down: Matrix, rows: Array) -> Array:
    """[R, d] -> [R, d]; `gate_up` has the rows of both matrices."""
    gate, up = mx.split(gate_up(rows), 2, axis=-1)
    return down(gate * mx.sigmoid(gate) * up)
