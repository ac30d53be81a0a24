"""Base of all head networks: the target's embeddings and head, decoder layer parts, and costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paceline.decoding.types import tap_name
from paceline.drafters.heads import DraftCost, Sizes, check_fits
from paceline_mlx.heads.cache import evaluate
from paceline_mlx.heads.config import HeadConfig
from paceline_mlx.heads.weights import LayerWeights, Matrix
from paceline_mlx.hooks import Array
from paceline_mlx.model import LoadedModel


class HeadNetwork:
    """A head opened for a target. Not thread-safe."""

    name: str
    config: HeadConfig
    dtype: Any

    def __init__(self, folder: Path, config: HeadConfig, target: LoadedModel) -> None:
        """Check that the head in `folder` matches its target.

        Raises ModelError with every size that differs.
        """
        embedded = target.embed(mx.array([0]))  # lazy: only its shape and dtype are used
        vocabulary = target.head(embedded).shape[-1]
        check_fits(
            folder, config.facts("", ""), Sizes("", target.layers, embedded.shape[-1], vocabulary)
        )
        self.config = config
        self.taps, self.vocab_size = config.taps, config.vocab_size
        self._target_dtype = embedded.dtype
        self._target = target
        self._rotary_dims = config.head_dim
        self._periods: Array | None = None
        """Inverses of RoPE's frequencies; None: plain RoPE, whose frequencies MLX computes."""
        if (rope := config.llama3_rope) is not None:
            self._periods = mx.array(rope.periods(config.head_dim, config.rope_theta))
        self.cost = DraftCost()

    def tapped(self, taps: Mapping[str, npt.NDArray[np.float32]], rows: int) -> Array:
        """Return the hidden states of a block's first `rows` rows, [rows, taps * d], evaluated.

        Uses `taps.arrays` (layer -> array on the device) if present. The result stays valid during
        the engine's next forward pass.
        """
        arrays = getattr(taps, "arrays", None)
        if arrays is None:
            arrays = {layer: mx.array(taps[tap_name(layer)]) for layer in self.taps}
        tapped = mx.concatenate([arrays[layer][:rows] for layer in self.taps], axis=1)
        return evaluate(tapped.astype(self.dtype))

    def _embed(self, tokens: Array) -> Array:
        """Embed tokens: [R] -> [R, d]."""
        return self._target.embed(tokens).astype(self.dtype)

    def _norm(self, rows: Array, weight: Array) -> Array:
        return mx.fast.rms_norm(rows, weight, self.config.rms_norm_eps)

    def _queries(self, layer: LayerWeights, rows: Array, position: int) -> Array:
        """Compute queries [1, heads, R, head_dim] of rows [R, d], rotated from `position`."""
        return self._rotated(self._heads(layer.query(rows)), layer.query_norm, position)

    def _keys_values(self, layer: LayerWeights, rows: Array, position: int) -> tuple[Array, Array]:
        """Compute keys and values [1, kv_heads, R, head_dim] of rows [R, d].

        Keys are rotated; the first is at `position`.
        """
        keys, values = mx.split(self._heads(layer.keys_values(rows)), 2, axis=1)
        return self._rotated(keys, layer.key_norm, position), values

    def _heads(self, rows: Array) -> Array:
        """Split rows into heads: [R, heads * head_dim] -> [1, heads, R, head_dim]."""
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
        """Return attention's output, [R, heads * head_dim]."""
        scale = self.config.head_dim**-0.5
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask
        )
        return attended[0].swapaxes(0, 1).reshape(queries.shape[2], -1)


def swiglu(gate_up: Matrix, down: Matrix, rows: Array) -> Array:
    """Run an MLP: [R, d] -> [R, d]. `gate_up` has the rows of both matrices."""
    gate, up = mx.split(gate_up(rows), 2, axis=-1)
    return down(gate * mx.sigmoid(gate) * up)
