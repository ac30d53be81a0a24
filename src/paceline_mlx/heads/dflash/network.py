"""Runs DFlash with MLX, on its target's device; only draft tokens are copied to the host.

Evaluation is lazy. If the policy does not read a draft before verification, its tokens stay in the
target's graph, and the engine waits once for draft, verification and new keys and values.

Matrices keep the checkpoint's precision or are quantized to 8 or 4 bits. Keys and values are stored
in mlx-lm's caches. One matrix computes both, for context and block together; the block's rows are
appended to the cache, then trimmed.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import DeferredRows
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.cache import HeadCache, NewRows
from paceline_mlx.heads.dflash.chain import Candidates, ChainHead
from paceline_mlx.heads.dflash.checkpoint import Config, read_config, read_tensors
from paceline_mlx.heads.drafter import DFlashDrafter
from paceline_mlx.heads.network import HeadNetwork, swiglu
from paceline_mlx.heads.weights import Matrix, Weights
from paceline_mlx.hooks import Array
from paceline_mlx.model import LoadedModel


class Kernel(NamedTuple):
    base: Array
    """[2, taps, groups, channels per group]"""
    projection: Matrix


class Network(HeadNetwork):
    """A checkpoint opened for a target; an `OpenHead`."""

    name = "dflash"
    config: Config

    def __init__(
        self,
        folder: Path,
        target: LoadedModel,
        *,
        window: int | None = None,
        bits: int | None = None,
    ) -> None:
        """Check that the checkpoint in a folder matches the target, and read its weights.

        `window`: maximum context tokens in attention; None: all. `bits` per weight: 8 or 4; None:
        as stored. Raises ModelError if it is not supported or does not match the target.
        """
        config = read_config(folder)
        super().__init__(folder, config, target)
        tensors = read_tensors(folder, config)
        self.dtype = tensors["fc.weight"].dtype
        weights = Weights(tensors, self.dtype, bits)
        self._chain = None
        if config.chain is not None:
            shapes = config.chain.shapes(config.hidden_size, config.vocab_size)
            self._chain = ChainHead(config.chain, {name: tensors[name] for name in shapes})
        self._fc = weights.matrix("fc")
        self._hidden_norm, self._last_norm = weights.vector("hidden_norm"), weights.vector("norm")
        names = [f"layers.{number}." for number in range(config.num_hidden_layers)]
        self._layers = [weights.layer(name) for name in names]
        self._attention_kernels = [
            self._kernel(tensors, f"{name}attention_conv", bits) for name in names
        ]
        self._mlp_kernels = [self._kernel(tensors, f"{name}mlp_conv", bits) for name in names]
        self._window = window

    def new_cache(self) -> HeadCache:
        return HeadCache(self.config.num_hidden_layers)

    def drafter(self, cache: HeadCache, sampling: Sampling, prompt_length: int) -> DFlashDrafter:
        return DFlashDrafter(self, cache, sampling, prompt_length)

    def prefill(self, cache: HeadCache, rows: NewRows) -> None:
        """Append keys and values of rows to the cache, which has those of all earlier rows."""
        context = self._context(rows.tapped)
        cache.drop_drafted()
        for layer, held in zip(self._layers, cache.layers, strict=True):
            held.update_and_fetch(*self._keys_values(layer, context, rows.start))
        cache.positions += range(rows.start, rows.start + len(rows.tapped))
        cache.evaluate()

    def draft(
        self,
        cache: HeadCache,
        token: int,
        position: int,
        rows: NewRows | None = None,
        *,
        sampler: DraftSampler,
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Append rows to the cache and fill a block that begins with `token`, at `position`.

        `token` is the last one; its hidden states are not known yet. `rows` are the hidden states
        of the newest tokens before it, if any. Returns the block's draft tokens, the picks of
        `sampler`, and their probabilities. Without a chain, both are deferred if they are the most
        likely ones.
        """
        if rows is not None and rows.start + len(rows.tapped) != position:
            self.prefill(cache, rows)
            rows = None
        block = self.config.block_size
        new = 0 if rows is None else len(rows.tapped)
        context = None if rows is None else self._context(rows.tapped)
        tokens = mx.array([token, *[self.config.mask_token_id] * (block - 1)])
        hidden = self._embed(tokens) * self.config.input_embedding_scale
        cache.drop_drafted()
        cache.positions += range(position - new, position)
        for number, layer in enumerate(self._layers):
            window, held = self.config.windows[number], cache.layers[number]
            normed, kernel = self._convolved(
                self._norm(hidden, layer.input_norm), self._attention_kernels[number]
            )
            both = normed if context is None else mx.concatenate([context, normed])
            stored = held.update_and_fetch(*self._keys_values(layer, both, position - new))
            held.trim(block)
            first = self._first_row(cache, position, window)
            keys, values = (array[..., first:, :] for array in stored)
            mask = self._mask(cache, first, position, window)
            attended = self._attended(self._queries(layer, normed, position), keys, values, mask)
            hidden = hidden + _convolve(layer.output(attended), kernel)
            normed, kernel = self._convolved(
                self._norm(hidden, layer.post_norm), self._mlp_kernels[number]
            )
            hidden = hidden + _convolve(swiglu(layer.gate_up, layer.down, normed), kernel)
        hidden = self._norm(hidden[self.config.first_drafted :], self._last_norm)
        logits = self._logits(hidden)
        if self._chain is not None:
            return self._chain.choose(self._candidates(logits, hidden), token, position, sampler)
        if sampler.picks_argmax:
            return _greedy(logits)
        return sampler.pick_rows(np.array(logits), position + 1)

    def _kernel(self, tensors: dict[str, Array], name: str, bits: int | None) -> Kernel | None:
        form = self.config.convolution
        if form is None:
            return None
        base = tensors[f"{name}.base_kernel"].astype(self.dtype)
        projection = Weights(tensors, self.dtype, bits).matrix(f"{name}.kernel_projection")
        return Kernel(base.reshape(2, form.taps, -1, form.group), projection)

    def _context(self, tapped: Array) -> Array:
        """Compute the input of every layer's keys and values: [n, taps * d] -> [n, d]."""
        return self._norm(self._fc(tapped), self._hidden_norm)

    def _convolved(self, rows: Array, kernel: Kernel | None) -> tuple[Array, Array | None]:
        """Convolve a sublayer's input [B, d]; also return the kernel for its output."""
        if kernel is None:
            return rows, None
        _, taps, groups, _ = kernel.base.shape
        dynamic = kernel.projection(rows).reshape(len(rows), 2, taps, groups, 1)
        return _convolve(rows, kernel.base[0] + dynamic[:, 0]), kernel.base[1] + dynamic[:, 1]

    def _first_row(self, cache: HeadCache, position: int, window: int | None) -> int:
        """Return the first cache row that any of the block's rows attends to."""
        first = 0
        if self._window is not None:
            first = max(len(cache) - self._window, 0)
        if window is not None:
            first = max(first, bisect_left(cache.positions, position - window + 1))
        return first

    def _mask(
        self, cache: HeadCache, first: int, position: int, window: int | None
    ) -> Array | None:
        """Return a block's attention mask over itself and the cache rows starting at `first`.

        The mask is [block, rows + block] bool; None: nothing is masked.
        """
        causal = window is not None if self.config.causal is None else self.config.causal
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
        """Compute the logits: [R, d] -> [R, vocab] float32."""
        config = self.config
        logits = self._target.head(hidden.astype(self._target_dtype)).astype(mx.float32)
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        cap = config.final_logit_softcapping
        return mx.tanh(logits / cap) * cap if cap else logits

    def _candidates(self, logits: Array, hidden: Array) -> Candidates:
        assert self.config.chain is not None
        count = min(self.config.chain.candidates, logits.shape[-1])
        tokens = mx.argpartition(-logits, count - 1, axis=-1)[:, :count]
        scores = mx.take_along_axis(logits, tokens, axis=-1)
        mx.eval(tokens, scores, hidden)
        return Candidates(
            np.array(tokens).astype(np.int64),
            np.array(scores),
            np.array(hidden.astype(mx.float32)),
        )


def _greedy(logits: Array) -> tuple[Sequence[int], Sequence[float]]:
    """Return each row's most likely token, and its probability.

    Probabilities are read only before verification, together with the tokens.
    """
    chances = mx.exp(logits.max(axis=-1) - mx.logsumexp(logits, axis=-1))
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)

    def on_host(array: Array, *also: Array) -> list[Any]:
        mx.eval(array, *also)
        numbers: list[Any] = np.array(array).tolist()
        return numbers

    return (
        DeferredRows(lambda: on_host(tokens), len(logits), tokens),
        DeferredRows(lambda: on_host(chances, tokens), len(logits)),
    )


def _convolve(rows: Array, kernel: Array | None) -> Array:
    """Convolve rows [B, d] with `kernel` [B, taps, groups, channels], if any; see `Convolution`."""
    if kernel is None:
        return rows
    count, taps, groups, channels = kernel.shape
    blocks = rows.reshape(count, groups, channels)
    total = kernel[:, 0] * blocks
    for tap in range(1, taps):
        before = mx.zeros((tap, groups, channels), rows.dtype)
        total = total + kernel[:, tap] * mx.concatenate([before, blocks[:-tap]])
    return total.reshape(count, -1)
