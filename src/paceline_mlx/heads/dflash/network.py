"""Runs DFlash with MLX, on the device of its target; only draft tokens go to the host.

Evaluation is lazy. A policy that does not read the draft before it is verified leaves its tokens in
the target's graph, and the engine waits once for draft, verification and new keys and values.

Matrices keep the checkpoint's precision or are quantized to 8 or 4 bits. Keys and values are in
caches of mlx-lm. One matrix computes keys and values, of context and block together; the block's
rows are appended to the cache and trimmed.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paceline.decoding.types import DeferredRows
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.context import LONG_CONTEXT, ContextCache, DraftCost, median_seconds
from paceline_mlx.heads.dflash.chain import ChainHead, Rows
from paceline_mlx.heads.dflash.checkpoint import read_tensors
from paceline_mlx.heads.dflash.config_file import read_config
from paceline_mlx.heads.dflash.weights import Kernel, Layer, layer_of, on_device
from paceline_mlx.heads.parts import (
    DeviceKV,
    Matrix,
    check_pair,
    evaluate,
    swiglu,
    tapped_rows,
    to_host,
)
from paceline_mlx.hooks import Array
from paceline_mlx.model import LoadedModel


class Network:
    """A checkpoint opened for a target. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        target: LoadedModel,
        *,
        window: int | None = None,
        bits: int | None = None,
    ) -> None:
        """Check that the checkpoint fits the target, and read the weights.

        Args:
            folder: a checkpoint; see `config_file`.
            target: with embeddings and head.
            window: tokens of context in attention at most; None: all.
            bits: 8 or 4 bits per weight; None: as in the checkpoint.

        Raises:
            ModelError: the checkpoint cannot be used, or not with this target.
        """
        self.config = read_config(folder)
        self._target_dtype = check_pair(folder, self.config, target)
        tensors, heads = read_tensors(folder, self.config)
        weights = on_device(tensors)
        chain = self.config.chain
        self._chain = None if chain is None else ChainHead(chain, heads)
        self._dtype = weights["fc.weight"].dtype
        self._fc = Matrix(weights["fc.weight"], bits)
        self._hidden_norm, self._norm = weights["hidden_norm.weight"], weights["norm.weight"]
        self._layers = [
            layer_of(weights, layer, self.config, bits=bits)
            for layer in range(self.config.num_hidden_layers)
        ]
        # MLX computes the frequencies of plain RoPE itself, and takes others as their inverses.
        self._periods = None
        if (rope := self.config.llama3_rope) is not None:
            self._periods = mx.array(rope.periods(self.config.head_dim, self.config.rope_theta))
        self._embed = target.embed
        self._head = target.head
        self._window = window
        self.taps = self.config.target_layer_ids
        self.cost = self._measure_cost()

    def new_cache(self) -> ContextCache:
        """An empty cache for a sequence."""
        return ContextCache(DeviceKV(self.config.num_hidden_layers))

    def tapped(self, taps: Mapping[str, npt.NDArray[np.float32]], rows: int) -> Array:
        """Hidden states of a call's first `rows` rows; see `tapped_rows`."""
        return tapped_rows(taps, self.taps, rows, self._dtype)

    def concat(self, parts: Sequence[Array]) -> Array:
        """Concatenate along tokens: [n, taps * d]; without parts [0, taps * d]."""
        return mx.concatenate([mx.zeros((0, self.config.tapped_size), self._dtype), *parts])

    def prefill(self, cache: ContextCache, tapped: Array, start: int) -> None:
        """Append keys and values of `tapped`, at positions from `start`, to the cache."""
        if not len(tapped):
            return
        context = self._context(tapped)
        cache.kv.truncate(len(cache))
        for layer, layer_cache in zip(self._layers, cache.kv.caches, strict=True):
            layer_cache.update_and_fetch(*self._keys_values(layer, context, start))
        cache.positions += range(start, start + len(tapped))
        evaluate(cache.kv.arrays())

    def draft(
        self,
        cache: ContextCache,
        token: int,
        position: int,
        tapped: Array,
        start: int,
        *,
        sampler: DraftSampler | None = None,
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Append `tapped` to the cache and fill a block that begins with `token` at `position`.

        Args:
            cache: of the tokens before `start`.
            token: the last token, whose hidden states are not known yet.
            position: of `token`.
            tapped: hidden states of the newest tokens before it.
            start: the position of the first of them.
            sampler: picks the drafts; None: they are the likeliest.

        Returns:
            The block's draft tokens, and their probabilities; both pending, unless a sampler or
            a chain picked them.
        """
        new, block = len(tapped), self.config.block_size
        if new and start + new != position:
            self.prefill(cache, tapped, start)
            new = 0
        tokens = mx.array([token, *[self.config.mask_token_id] * (block - 1)])
        hidden = self._embed(tokens).astype(self._dtype) * self.config.embedding_scale
        context = self._context(tapped) if new else None
        cache.kv.truncate(len(cache))
        cache.positions += range(position - new, position)
        for layer, layer_cache, window in zip(
            self._layers, cache.kv.caches, self.config.windows, strict=True
        ):
            normed, kernel = self._convolved(
                self._rms_norm(hidden, layer.input_norm), layer.attention_kernel
            )
            both = normed if context is None else mx.concatenate([context, normed])
            held = layer_cache.update_and_fetch(*self._keys_values(layer, both, position - new))
            layer_cache.trim(block)
            first = self._first_row(cache, position, window)
            keys, values = (rows[..., first:, :] for rows in held)
            attended = mx.fast.scaled_dot_product_attention(
                self._queries(layer, normed, position),
                keys,
                values,
                scale=self.config.head_dim**-0.5,
                mask=self._mask(cache, first, position, window),
            )
            attended = layer.output(attended[0].swapaxes(0, 1).reshape(block, -1))
            hidden = hidden + self._finished(attended, kernel, layer.attention_kernel)
            hidden = hidden + self._feed_forward(layer, hidden)
        hidden = self._rms_norm(hidden[self.config.first_drafted :], self._norm)
        logits = self._logits(hidden)
        if self._chain is not None:
            return self._chain.choose(self._best(logits, hidden), token, position, sampler)
        if sampler is not None:
            return sampler.pick_rows(np.array(logits), position + 1)
        return self._greedy(logits)

    def _context(self, tapped: Array) -> Array:
        """[n, taps * d] -> [n, d], the input of every layer's keys and values."""
        return self._rms_norm(self._fc(tapped), self._hidden_norm)

    def _queries(self, layer: Layer, rows: Array, position: int) -> Array:
        """[R, d] -> [1, heads, R, head_dim], rotated to positions from `position` on."""
        heads = layer.query(rows).reshape(len(rows), -1, self.config.head_dim).swapaxes(0, 1)
        return self._rope(self._rms_norm(heads, layer.query_norm)[None], position)

    def _keys_values(self, layer: Layer, rows: Array, position: int) -> tuple[Array, Array]:
        """[R, d] -> keys, rotated to positions from `position` on, and values.

        Both are [1, kv_heads, R, head_dim].
        """
        both = layer.keys_values(rows).reshape(len(rows), -1, self.config.head_dim)
        keys, values = mx.split(both.swapaxes(0, 1)[None], 2, axis=1)
        return self._rope(self._rms_norm(keys, layer.key_norm), position), values

    def _rope(self, heads: Array, position: int) -> Array:
        """RoPE, half rotation."""
        return mx.fast.rope(
            heads,
            self.config.head_dim,
            traditional=False,
            base=None if self._periods is not None else self.config.rope_theta,
            scale=1.0,
            offset=position,
            freqs=self._periods,
        )

    def _feed_forward(self, layer: Layer, hidden: Array) -> Array:
        normed, kernel = self._convolved(
            self._rms_norm(hidden, layer.post_norm), layer.feed_forward_kernel
        )
        fed = swiglu(layer.gate_up, layer.down, normed)
        return self._finished(fed, kernel, layer.feed_forward_kernel)

    def _convolved(self, rows: Array, kernel: Kernel | None) -> tuple[Array, Array]:
        """A sublayer's input [B, d] convolved, and the dynamic kernel for its output."""
        if kernel is None:
            return rows, None
        _, taps, groups, _ = kernel.base.shape
        dynamic = kernel.projection(rows).reshape(len(rows), 2, taps, groups, 1)
        return _convolve(rows, kernel.base[0] + dynamic[:, 0]), dynamic[:, 1]

    def _finished(self, rows: Array, dynamic: Array, kernel: Kernel | None) -> Array:
        """A sublayer's output [B, d], convolved."""
        return rows if kernel is None else _convolve(rows, kernel.base[1] + dynamic)

    def _rms_norm(self, rows: Array, weight: Array) -> Array:
        return mx.fast.rms_norm(rows, weight, self.config.rms_norm_eps)

    def _first_row(self, cache: ContextCache, position: int, window: int | None) -> int:
        """The first cache row in the attention of any of the block's rows."""
        first = 0
        if self._window is not None:
            first = max(len(cache) - self._window, 0)
        if window is not None:
            first = max(first, bisect_left(cache.positions, position - window + 1))
        return first

    def _mask(
        self, cache: ContextCache, first: int, position: int, window: int | None
    ) -> Array | None:
        """Attention mask of a block over the cache rows from `first` on and over itself.

        [block, rows + block] bool; None: nothing is masked.
        """
        causal = self.config.is_causal(window)
        block_positions = np.arange(position, position + self.config.block_size)
        keys = np.array([*cache.positions[first:], *block_positions])
        if not causal and (window is None or block_positions[-1] - keys[0] < window):
            return None
        ahead = keys - block_positions[:, None]
        seen = ahead <= 0 if causal else np.full(ahead.shape, fill_value=True)
        if window is not None:
            seen &= np.abs(ahead) < window
        return mx.array(seen)

    def _logits(self, hidden: Array) -> Array:
        """[R, d] -> [R, vocab] float32."""
        config = self.config
        logits = self._head(hidden.astype(self._target_dtype)).astype(mx.float32)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if config.logit_cap is not None:
            logits = mx.tanh(logits / config.logit_cap) * config.logit_cap
        return logits

    def _best(self, logits: Array, hidden: Array) -> Rows:
        """Each row's candidates, on the host."""
        assert self.config.chain is not None
        count = min(self.config.chain.candidates, logits.shape[-1])
        tokens = mx.argpartition(-logits, count - 1, axis=-1)[:, :count]
        scores = mx.take_along_axis(logits, tokens, axis=-1)
        mx.eval(tokens, scores, hidden)
        return Rows(
            np.array(tokens).astype(np.int64),
            np.array(scores),
            np.array(hidden.astype(mx.float32)),
        )

    def _greedy(self, logits: Array) -> tuple[Sequence[int], Sequence[float]]:
        """The rows' most probable tokens, and their probabilities."""
        chances = mx.exp(logits.max(axis=-1) - mx.logsumexp(logits, axis=-1))
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        # Probabilities are read before verification only, together with the tokens.
        return (
            DeferredRows(lambda: to_host(tokens), len(logits), tokens),
            DeferredRows(lambda: to_host(chances, tokens), len(logits)),
        )

    def _measure_cost(self) -> DraftCost:
        """Seconds of a block at one token of context and at a long context."""

        def rows(count: int) -> Array:
            return mx.zeros((count, self.config.tapped_size), self._dtype)

        def seconds(cache: ContextCache) -> float:
            def block() -> None:  # the context grows by a token
                at = len(cache)
                list(self.draft(cache, 0, at + 1, rows(1), at)[0])

            return median_seconds(block)

        windows = [*self.config.windows]
        widest = None if None in windows else max(filter(None, windows))
        attended = min(filter(None, (self._window, widest)), default=None)
        base = seconds(self.new_cache())
        length = min(LONG_CONTEXT, attended or LONG_CONTEXT)
        cache = self.new_cache()
        self.prefill(cache, rows(length), 0)
        return DraftCost(base, max(seconds(cache) - base, 0.0) / length, attended)


def _convolve(rows: Array, kernel: Array) -> Array:
    """Convolve [B, d] over the rows; see `Convolution`. `kernel` is [B, taps, groups, channels]."""
    count, taps, groups, channels = kernel.shape
    blocks = rows.reshape(count, groups, channels)
    total = kernel[:, 0] * blocks
    for tap in range(1, taps):
        before = mx.zeros((tap, groups, channels), rows.dtype)
        total = total + kernel[:, tap] * mx.concatenate([before, blocks[:-tap]])
    return total.reshape(count, -1)
