"""Runs a head with MLX, on its target's device.

Each step's graph is built before the previous step is evaluated, so the device does not wait while
the host decides whether the chain continues.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from paceline.decoding.sampling import Sampling
from paceline.drafters.draft_sampling import DraftSampler
from paceline.errors import ModelError
from paceline_mlx.heads.cache import PREFILL_CHUNK, ChainCache, NewRows
from paceline_mlx.heads.drafter import MtpDrafter
from paceline_mlx.heads.mtp import eagle3, qwen3_5, read_config
from paceline_mlx.heads.mtp.head import ChainConfig
from paceline_mlx.heads.network import HeadNetwork, swiglu
from paceline_mlx.hooks import Array
from paceline_mlx.model import LoadedModel

_LENGTH = 8
"""Maximum tokens per chain without the option `length`."""


class ChainNetwork(HeadNetwork):
    """A head opened for a target; an `OpenHead`."""

    name = "mtp"
    config: ChainConfig

    def __init__(
        self,
        folder: Path,
        target: LoadedModel,
        *,
        length: int = _LENGTH,
        vocab: int | None = None,
        bits: int | None = None,
    ) -> None:
        """Read an EAGLE-3 head or a Qwen3.5 checkpoint's head, and check it against the target.

        `vocab`: draft only the first `vocab` tokens; None: all. `bits` per weight: 8 or 4; None:
        unquantized, in the dtype of the target's embeddings. Raises ModelError if the head is not
        supported or does not match the target.
        """
        config = read_config(folder, lambda: target.layers)
        super().__init__(folder, config, target)
        self.dtype = self._target_dtype
        read_weights = qwen3_5.read_weights if config.own else eagle3.read_weights
        self._weights = read_weights(folder, config, self.dtype, bits)
        self._rotary_dims = config.rotary_dims
        self.length = length
        self._tokens = self._weights.draft_vocab
        if vocab is not None:
            if config.draft_vocab_size is not None:
                raise ModelError(
                    f"vocab cannot be used with {folder}: it has its own output matrix for "
                    f"{config.draft_vocab_size} tokens; remove vocab"
                )
            # In a BPE vocabulary the first tokens are the most frequent.
            self._tokens = np.arange(min(vocab, config.vocab_size), dtype=np.int64)
        self._head: Callable[[Array], Array] = self._weights.head or target.head
        self._draft_vocab = None
        if self._tokens is not None:
            self._draft_vocab = mx.array(self._tokens.astype(np.int32))
            if self._weights.head is None:
                self._head = target.head_of(self._draft_vocab)

    def new_cache(self) -> ChainCache:
        return ChainCache()

    def drafter(self, cache: ChainCache, sampling: Sampling, prompt_length: int) -> MtpDrafter:
        return MtpDrafter(self, cache, sampling, prompt_length)

    def prefill(self, cache: ChainCache, rows: NewRows) -> None:
        """Append rows to the cache without drafting; it must have all earlier rows."""
        for at in range(0, len(rows.following), PREFILL_CHUNK):
            self._append(cache, _part(rows, at, at + PREFILL_CHUNK))
            cache.evaluate()

    def draft(
        self,
        cache: ChainCache,
        rows: NewRows,
        limit: int,
        min_chance: float,
        *,
        sampler: DraftSampler,
    ) -> tuple[list[int], list[float]]:
        """Append one or more rows, and draft after the last one.

        Returns 1 to `limit` draft tokens and their probabilities. Each is the pick of `sampler`
        after those before it. The chain ends when all drafts so far are right with less than the
        probability `min_chance`. The cache does not keep drafted rows.
        """
        count = len(rows.following)
        surplus = max(count - PREFILL_CHUNK, 0)
        self.prefill(cache, _part(rows, 0, surplus))
        carried = self._append(cache, _part(rows, surplus, count))
        position = rows.start + count
        if sampler.picks_argmax:
            drafted = self._likeliest(cache, carried, position, limit)
        else:
            drafted = self._sampled(cache, carried, position, sampler)
        drafts: list[int] = []
        chances: list[float] = []
        likely = 1.0
        for token, chance in drafted:
            drafts.append(token)
            chances.append(chance)
            likely *= chance
            if len(drafts) == limit or likely < min_chance:
                break
        return drafts, chances

    def _likeliest(
        self, cache: ChainCache, stream: Array, position: int, limit: int
    ) -> Iterator[tuple[int, float]]:
        """Yield drafts and their probabilities, building each next graph before reading a draft."""
        token, chance, carried = self._pick(stream)
        mx.async_eval(token, chance)
        for later in reversed(range(limit)):
            ahead = token, chance, carried
            if later:
                ahead = self._pick(self._layer(cache, token, carried, position))
                mx.async_eval(ahead[:2])
            yield int(token.item()), float(chance.item())
            token, chance, carried = ahead
            position += 1

    def _sampled(
        self, cache: ChainCache, stream: Array, position: int, sampler: DraftSampler
    ) -> Iterator[tuple[int, float]]:
        """Yield drafts picked on the host, and their probabilities: steps wait for each other."""
        while True:
            logits, carried = self._logits(stream)
            token, chance = sampler.pick(np.array(logits), position + 1, self._tokens)
            yield token, chance
            stream = self._layer(cache, mx.array([token]), carried, position)
            position += 1

    def _append(self, cache: ChainCache, rows: NewRows) -> Array:
        """Append rows; return the residual stream after the last one, [1, d]."""
        fuse, tapped = self._weights.fuse, rows.tapped
        hidden = self._norm(tapped, fuse) if self.config.own else fuse(tapped)
        cache.drop_drafted()
        residual = self._layer(cache, mx.array([*rows.following]), hidden, rows.start)
        cache.positions += range(rows.start, rows.start + len(rows.following))
        return residual

    def _layer(self, cache: ChainCache, tokens: Array, hidden: Array, start: int) -> Array:
        """Run n rows and cache their keys and values; return the last residual stream, [1, d]."""
        weights, layer = self._weights, self._weights.layer
        embedded = self._norm(self._embed(tokens), weights.embedding_norm)
        both = mx.concatenate([embedded, self._norm(hidden, weights.hidden_norm)], axis=-1)
        stream, rows = hidden, both
        if weights.join is not None:
            stream = weights.join(both)
            rows = self._norm(stream, layer.input_norm)
        queries = self._queries(layer, rows, start)
        keys, values = cache.layers[0].update_and_fetch(*self._keys_values(layer, rows, start))
        mask = "causal" if len(tokens) > 1 else None
        attended = self._attended(queries, keys, values, mask)
        if layer.gate is not None:
            attended = attended * mx.sigmoid(layer.gate(rows))
        last = stream[-1:] + layer.output(attended[-1:])
        return last + swiglu(layer.gate_up, layer.down, self._norm(last, layer.post_norm))

    def _pick(self, stream: Array) -> tuple[Array, Array, Array]:
        """Return the most likely token [1] int32, its probability, and the next step's input."""
        logits, carried = self._logits(stream)
        token = mx.argmax(logits, keepdims=True)
        chance = mx.exp(logits.max() - mx.logsumexp(logits))
        if self._draft_vocab is not None:
            token = self._draft_vocab[token]
        return token.astype(mx.int32), chance, carried

    def _logits(self, stream: Array) -> tuple[Array, Array]:
        """Return logits [n] float32 of a residual stream [1, d], and the next step's input."""
        out = self._norm(stream, self._weights.norm)
        logits = self._head(out)[0].astype(mx.float32)
        return logits, stream if self._weights.join is None else out


def _part(rows: NewRows, start: int, end: int) -> NewRows:
    return NewRows(rows.tapped[start:end], rows.start + start, rows.following[start:end])
