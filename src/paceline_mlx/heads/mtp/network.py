"""Runs a head with MLX, on the device of its target.

Each step's graph is built before the step before it is evaluated, so that the device does not wait
for the host to see whether the chain goes on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.context import (
    LONG_CONTEXT,
    PREFILL_CHUNK,
    DraftCost,
    median_seconds,
)
from paceline_mlx.heads.mtp.cache import HeadCache, Rows
from paceline_mlx.heads.mtp.checkpoint import Head, HeadWeights, cut_vocabulary
from paceline_mlx.heads.parts import (
    DeviceKV,
    Matrix,
    check_pair,
    evaluate,
    swiglu,
    tapped_rows,
)
from paceline_mlx.hooks import Array
from paceline_mlx.model import LoadedModel

_TIMED_STEPS = 3
"""Steps after the first one in the measurement of a step."""

_TIMED_ROWS = 64
"""Rows that are read before a draft in the measurement of a row."""


@dataclass(frozen=True, slots=True)
class ChainCost:
    """Seconds of a chain of drafts."""

    first: DraftCost
    """Of one draft, with the hidden states of one new token."""
    step: float
    """Of a further draft."""
    row: float = 0.0
    """Of a further token whose hidden states are read first."""

    def __call__(self, context: int, drafts: float, rows: int = 1) -> float:
        """Seconds of `drafts` >= 1 tokens at `context` tokens, the last `rows` >= 1 of them new."""
        return self.first(context) + self.row * (rows - 1) + self.step * (drafts - 1)


class HeadNetwork:
    """A head opened for a target. Not thread-safe."""

    def __init__(
        self,
        head: Head,
        target: LoadedModel,
        *,
        vocab: int | None = None,
        bits: int | None = None,
    ) -> None:
        """Check that the head fits the target, and put its weights on the device.

        Args:
            head: as `read_head` returns it.
            target: with embeddings and head.
            vocab: draft only this number of tokens, the first ones; None: all.
            bits: 8 or 4 bits per weight; None: in the precision of the target's embeddings.

        Raises:
            ModelError: the head is one of another target.
        """
        self._dtype = check_pair(head.path, head.config, target)
        self.config = head.config
        self.taps = head.config.taps
        self._weights = _on_device(head.weights, self._dtype, bits)
        self._embed = target.embed
        self._head: Callable[[Array], Array] = self._weights.head or target.head
        self._tokens = head.draft_vocab if vocab is None else cut_vocabulary(head, vocab)
        self._draft_vocab = None
        if self._tokens is not None:
            self._draft_vocab = mx.array(self._tokens.astype(np.int32))
            if self._weights.head is None:
                self._head = target.head_of(self._draft_vocab)
        self.cost = self._measure_cost()

    def new_cache(self) -> HeadCache:
        """An empty cache for a sequence."""
        return HeadCache(DeviceKV(1))

    def tapped(self, taps: Mapping[str, npt.NDArray[np.float32]], rows: int) -> Array:
        """Hidden states of a call's first `rows` rows; see `tapped_rows`."""
        return tapped_rows(taps, self.taps, rows, self._dtype)

    def prefill(self, cache: HeadCache, rows: Rows) -> None:
        """Append rows to the cache, which has those before them, without drafting."""
        tapped, tokens, start = rows
        for at in range(0, len(tokens), PREFILL_CHUNK):
            end = at + PREFILL_CHUNK
            self._append(cache, Rows(tapped[at:end], tokens[at:end], start + at))
            evaluate(cache.kv.arrays())

    def draft(
        self,
        cache: HeadCache,
        rows: Rows,
        limit: int,
        least: float,
        *,
        sampler: DraftSampler | None = None,
    ) -> tuple[list[int], list[float]]:
        """Append 1 row or more, and draft after the last one.

        Returns 1 to `limit` draft tokens, each the likeliest after those before it or the pick of
        `sampler`, and the probability of each. The chain ends where all drafts so far are right
        with less than the probability `least`. Drafted rows are not kept in the cache.
        """
        tapped, tokens, start = rows
        surplus = max(len(tokens) - PREFILL_CHUNK, 0)
        self.prefill(cache, Rows(tapped[:surplus], tokens[:surplus], start))
        carried = self._append(cache, Rows(tapped[surplus:], tokens[surplus:], start + surplus))
        position = start + len(tokens)
        if sampler is not None:
            return self._sampled(cache, carried, position, sampler, limit=limit, least=least)
        drafts: list[int] = []
        chances: list[float] = []
        likely = 1.0
        token, chance, carried = self._pick(carried)
        mx.async_eval(token, chance)
        while True:
            ahead = None
            if len(drafts) + 1 < limit:
                ahead = self._pick(self._layer(cache, token, carried, position))
                mx.async_eval(ahead[:2])
            drafts.append(int(token.item()))
            chances.append(float(chance.item()))
            likely *= chances[-1]
            if ahead is None or likely < least:
                return drafts, chances
            token, chance, carried = ahead
            position += 1

    def _sampled(
        self,
        cache: HeadCache,
        stream: Array,
        position: int,
        sampler: DraftSampler,
        *,
        limit: int,
        least: float,
    ) -> tuple[list[int], list[float]]:
        """`draft` with a sampler, which picks on the host: a step waits for the one before it."""
        drafts: list[int] = []
        chances: list[float] = []
        likely = 1.0
        while True:
            logits, carried = self._logits(stream)
            token, chance = sampler.pick(np.array(logits), position + 1, self._tokens)
            drafts.append(token)
            chances.append(chance)
            likely *= chance
            if len(drafts) == limit or likely < least:
                return drafts, chances
            stream = self._layer(cache, mx.array([token]), carried, position)
            position += 1

    def _append(self, cache: HeadCache, rows: Rows) -> Array:
        """Append rows; the residual stream after the last one, [1, d]."""
        weights = self._weights
        if isinstance(weights.fuse, Matrix):
            hidden = weights.fuse(rows.tapped)
        else:
            hidden = self._norm(rows.tapped, weights.fuse)
        cache.kv.truncate(len(cache))  # drafted rows go
        residual = self._layer(cache, mx.array([*rows.tokens]), hidden, rows.start)
        cache.positions += range(rows.start, rows.start + len(rows.tokens))
        return residual

    def _layer(self, cache: HeadCache, tokens: Array, hidden: Array, start: int) -> Array:
        """The residual stream after the last of n rows, [1, d]; keys and values of all are kept."""
        weights, config = self._weights, self.config
        embedded = self._embed(tokens).astype(self._dtype)
        both = mx.concatenate(
            [
                self._norm(embedded, weights.embedding_norm),
                self._norm(hidden, weights.hidden_norm),
            ],
            axis=-1,
        )
        stream, rows = hidden, both
        if weights.join is not None:
            stream = weights.join(both)
            rows = self._norm(stream, weights.attention_norm)
        count = len(tokens)
        queries = self._rotated(weights.query(rows), weights.query_norm, start)
        pairs = weights.keys_values(rows)
        keys, values = mx.split(pairs, 2, axis=-1)
        keys = self._rotated(keys, weights.key_norm, start)
        values = values.reshape(count, -1, config.head_dim).swapaxes(0, 1)[None]
        keys, values = cache.kv.caches[0].update_and_fetch(keys, values)
        attended = mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=config.head_dim**-0.5,
            mask="causal" if count > 1 else None,
        )
        attended = attended[0].swapaxes(0, 1).reshape(count, -1)
        if weights.attention_gate is not None:
            attended = attended * mx.sigmoid(weights.attention_gate(rows))
        last = stream[-1:] + weights.output(attended[-1:])
        fed = self._norm(last, weights.post_norm)
        return last + swiglu(weights.gate_up, weights.down, fed)

    def _rotated(self, rows: Array, norm: Array | None, start: int) -> Array:
        """[n, heads * head_dim] -> [1, heads, n, head_dim], normed and rotated."""
        heads = rows.reshape(len(rows), -1, self.config.head_dim).swapaxes(0, 1)[None]
        if norm is not None:
            heads = self._norm(heads, norm)
        return mx.fast.rope(
            heads,
            self.config.rotary_dims,
            traditional=False,
            base=self.config.rope_theta,
            scale=1.0,
            offset=start,
        )

    def _pick(self, stream: Array) -> tuple[Array, Array, Array]:
        """The likeliest token [1] int32, its probability, and what the next step carries."""
        logits, carried = self._logits(stream)
        token = mx.argmax(logits, keepdims=True)
        chance = mx.exp(logits.max() - mx.logsumexp(logits))
        if self._draft_vocab is not None:
            token = self._draft_vocab[token]
        return token.astype(mx.int32), chance, carried

    def _logits(self, stream: Array) -> tuple[Array, Array]:
        """Logits [n] float32 after the residual stream [1, d], and what the next step carries."""
        out = self._norm(stream, self._weights.norm)
        logits = self._head(out)[0].astype(mx.float32)
        return logits, stream if self._weights.join is None else out

    def _norm(self, rows: Array, weight: Array) -> Array:
        return mx.fast.rms_norm(rows, weight, self.config.rms_norm_eps)

    def _measure_cost(self) -> ChainCost:
        """Of a draft after next to nothing and at a long context, a further step and a row."""

        def rows(count: int, start: int) -> Rows:
            tapped = mx.zeros((count, self.config.tapped_size), self._dtype)
            return Rows(tapped, [0] * count, start)

        def seconds(cache: HeadCache, count: int, drafts: int) -> float:
            return median_seconds(lambda: self.draft(cache, rows(count, len(cache)), drafts, 0.0))

        cache = self.new_cache()
        base = seconds(cache, 1, 1)
        step = (seconds(cache, 1, 1 + _TIMED_STEPS) - base) / _TIMED_STEPS
        row = (seconds(cache, _TIMED_ROWS, 1) - base) / (_TIMED_ROWS - 1)
        filled = self.new_cache()
        self.prefill(filled, rows(LONG_CONTEXT, 0))
        added = seconds(filled, 1, 1) - base
        first = DraftCost(base, max(added, 0.0) / LONG_CONTEXT)
        return ChainCost(first, max(step, 0.0), max(row, 0.0))


def _on_device(weights: HeadWeights, dtype: Any, bits: int | None) -> HeadWeights:
    """Matrices as `Matrix`, vectors as arrays."""

    def put(value: Array | None) -> Any:
        if value is None:
            return None
        array = value.astype(dtype)
        return Matrix(array, bits) if value.ndim == 2 else array

    return HeadWeights(
        **{field.name: put(getattr(weights, field.name)) for field in fields(weights)}
    )
