"""Runs DFlash with MLX, on the device of its target; only draft tokens go to the host.

Evaluation is lazy. A policy that does not read the draft before it is verified leaves its tokens in
the target's graph, and the engine waits once for draft, verification and new keys and values.

Matrices keep the checkpoint's precision or are quantized to 8 or 4 bits. Keys and values are in
caches of mlx-lm. One matrix computes keys and values, of context and block together; the block's
rows are appended to the cache and trimmed.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from paceline.decoding.draft_sampling import DraftSampler
from paceline.decoding.types import Pending
from paceline.drafters.dflash.checkpoint import read_config, read_draft_vocab
from paceline.drafters.dflash.mlx_weights import Layer, layer_of, read_weights
from paceline.drafters.dflash.network import measure_cost
from paceline.drafters.networks.context import ContextCache
from paceline.drafters.networks.mlx import (
    DeviceKV,
    Matrix,
    MlxArray,
    MlxShape,
    MlxTarget,
    evaluate,
    tapped_rows,
    to_host,
)
from paceline.drafters.networks.target import check_pair
from paceline.drafters.networks.tensors import Array


class MlxNetwork:
    """A checkpoint opened for a target; see `Network`."""

    def __init__(
        self, folder: Path, target: MlxTarget, *, window: int | None = None, bits: int | None = None
    ) -> None:
        """Check that the checkpoint fits the target, and read the weights.

        Args:
            folder: a checkpoint in z-lab's form.
            target: with embeddings and head.
            window: tokens of context in attention at most; None: all.
            bits: 8 or 4 bits per weight; None: as in the checkpoint.

        Raises:
            ModelError: the checkpoint cannot be used, or not with this target.
        """
        self.config = read_config(folder)
        import mlx.core as mx

        embedded = target.embed(mx.array([0]))  # lazy: only its shape and dtype are used
        shape = MlxShape(target.layers, embedded.shape[-1], target.head(embedded).shape[-1])
        check_pair(folder, self.config, shape)
        self._tokens = draft_vocab = read_draft_vocab(folder, self.config)
        weights = read_weights(folder, self.config)
        self._dtype, self._target_dtype = weights["fc.weight"].dtype, embedded.dtype
        self._fc = Matrix(weights["fc.weight"], bits)
        self._hidden_norm, self._norm = weights["hidden_norm.weight"], weights["norm.weight"]
        self._layers = [
            layer_of(weights, at, bits=bits) for at in range(self.config.num_hidden_layers)
        ]
        self._embed = target.embed
        self._head: Callable[[MlxArray], MlxArray] = target.head
        self._draft_vocab = None
        if draft_vocab is not None:
            self._draft_vocab = mx.array(draft_vocab.astype(np.int32))
            self._head = target.head_of(self._draft_vocab)
        self._window = window
        self.taps = self.config.target_layer_ids
        size = self.config.tapped_size
        self.cost = measure_cost(self, lambda rows: mx.zeros((rows, size), self._dtype), window)

    def new_cache(self) -> ContextCache[DeviceKV]:
        """An empty cache for a sequence."""
        return ContextCache(DeviceKV(self.config.num_hidden_layers))

    def tapped(self, taps: Mapping[str, Array], rows: int) -> MlxArray:
        """Hidden states of a call's first `rows` rows; see `tapped_rows`."""
        return tapped_rows(taps, self.taps, rows, self._dtype)

    def concat(self, parts: Sequence[MlxArray]) -> MlxArray:
        """Concatenate along tokens; see `Network`."""
        import mlx.core as mx

        return mx.concatenate([mx.zeros((0, self.config.tapped_size), self._dtype), *parts])

    def prefill(self, cache: ContextCache[DeviceKV], tapped: MlxArray, start: int) -> None:
        """Append keys and values of `tapped` to the cache; see `Network`."""
        if not len(tapped):
            return
        context = self._context(tapped)
        cache.kv.truncate(len(cache))
        for layer, kept in zip(self._layers, cache.kv.caches, strict=True):
            kept.update_and_fetch(*self._keys_values(layer, context, start))
        cache.positions += range(start, start + len(tapped))
        evaluate(cache.kv.arrays())

    def draft(
        self,
        cache: ContextCache[DeviceKV],
        token: int,
        position: int,
        tapped: MlxArray,
        start: int,
        *,
        sampler: DraftSampler | None = None,
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Append `tapped` and fill a block that begins with `token`; see `Network`.

        Both results are pending, unless a sampler picked them.
        """
        import mlx.core as mx

        new, block = len(tapped), self.config.block_size
        if new and start + new != position:
            self.prefill(cache, tapped, start)
            new = 0
        tokens = mx.array([token, *[self.config.mask_token_id] * (block - 1)])
        hidden = self._embed(tokens).astype(self._dtype)
        context = self._context(tapped) if new else None
        cache.kv.truncate(len(cache))
        cache.positions += range(position - new, position)
        for layer, kept, window in zip(
            self._layers, cache.kv.caches, self.config.windows, strict=True
        ):
            normed = self._rms_norm(hidden, layer.input_norm)
            both = normed if context is None else mx.concatenate([context, normed])
            held = kept.update_and_fetch(*self._keys_values(layer, both, position - new))
            kept.trim(block)
            first = self._first_row(cache, position, window)
            keys, values = (rows[..., first:, :] for rows in held)
            attended = mx.fast.scaled_dot_product_attention(
                self._queries(layer, normed, position),
                keys,
                values,
                scale=self.config.head_dim**-0.5,
                mask=_mask(cache, first, position, block, window),
            )
            hidden = hidden + layer.output(attended[0].swapaxes(0, 1).reshape(block, -1))
            hidden = hidden + self._feed_forward(layer, hidden)
        logits = self._logits(self._rms_norm(hidden[1:], self._norm))
        if sampler is not None:
            return sampler.pick_rows(np.array(logits), position + 1, self._tokens)
        return self._greedy(logits)

    def _context(self, tapped: MlxArray) -> MlxArray:
        """[n, taps * d] -> [n, d], the input of every layer's keys and values."""
        return self._rms_norm(self._fc(tapped), self._hidden_norm)

    def _queries(self, layer: Layer, rows: MlxArray, position: int) -> MlxArray:
        """[R, d] -> [1, heads, R, head_dim], rotated to positions from `position` on."""
        heads = layer.query(rows).reshape(len(rows), -1, self.config.head_dim).swapaxes(0, 1)
        return self._rope(self._rms_norm(heads, layer.query_norm)[None], position)

    def _keys_values(
        self, layer: Layer, rows: MlxArray, position: int
    ) -> tuple[MlxArray, MlxArray]:
        """[R, d] -> keys, rotated to positions from `position` on, and values.

        Both are [1, kv_heads, R, head_dim].
        """
        import mlx.core as mx

        both = layer.keys_values(rows).reshape(len(rows), -1, self.config.head_dim)
        keys, values = mx.split(both.swapaxes(0, 1)[None], 2, axis=1)
        return self._rope(self._rms_norm(keys, layer.key_norm), position), values

    def _rope(self, heads: MlxArray, position: int) -> MlxArray:
        """RoPE, half rotation."""
        import mlx.core as mx

        return mx.fast.rope(
            heads,
            self.config.head_dim,
            traditional=False,
            base=self.config.rope_theta,
            scale=1.0,
            offset=position,
        )

    def _feed_forward(self, layer: Layer, hidden: MlxArray) -> MlxArray:
        import mlx.core as mx

        gate, up = mx.split(layer.gate_up(self._rms_norm(hidden, layer.post_norm)), 2, axis=-1)
        return layer.down(gate * mx.sigmoid(gate) * up)

    def _rms_norm(self, rows: MlxArray, weight: MlxArray) -> MlxArray:
        import mlx.core as mx

        return mx.fast.rms_norm(rows, weight, self.config.rms_norm_eps)

    def _first_row(self, cache: ContextCache[DeviceKV], position: int, window: int | None) -> int:
        """The first cache row in the attention of any of the block's rows."""
        first = 0
        if self._window is not None:
            first = max(len(cache) - self._window, 0)
        if window is not None:
            first = max(first, bisect_left(cache.positions, position - window + 1))
        return first

    def _logits(self, hidden: MlxArray) -> MlxArray:
        """[R, d] -> [R, n] float32, of the whole or the draft vocabulary."""
        import mlx.core as mx

        return self._head(hidden.astype(self._target_dtype)).astype(mx.float32)

    def _greedy(self, logits: MlxArray) -> tuple[Sequence[int], Sequence[float]]:
        """The most probable token of each row, and its probability."""
        import mlx.core as mx

        chances = mx.exp(logits.max(axis=-1) - mx.logsumexp(logits, axis=-1))
        tokens = mx.argmax(logits, axis=-1)
        if self._draft_vocab is not None:
            tokens = self._draft_vocab[tokens]
        tokens = tokens.astype(mx.int32)
        # Probabilities are read before verification only, together with the tokens.
        return (
            Pending(lambda: to_host(tokens), len(logits), tokens),
            Pending(lambda: to_host(chances, tokens), len(logits)),
        )


def _mask(
    cache: ContextCache[DeviceKV], first: int, position: int, block: int, window: int | None
) -> MlxArray | None:
    """Attention mask of a block over the cache rows from `first` on and over itself.

    [block, rows + block] bool; None: nothing is masked.
    """
    import mlx.core as mx

    if window is None:
        return None
    own = range(position, position + block)
    keys = np.array([*cache.positions[first:], *own])
    if own[-1] - keys[0] < window:
        return None
    return mx.array(np.array(own)[:, None] - keys < window)
