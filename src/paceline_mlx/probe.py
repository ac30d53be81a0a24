"""Compares the bits of rows on this machine, for the loaded model and for its attention alone.

The model runs after a short and a long context, in forward passes of several numbers of rows.
Attention also runs on its own, with the model's shapes and random keys, at contexts up to 66,000
and around the numbers of keys where MLX may change kernels; this needs only one layer's memory.
Then passes with several sequences are compared with those of each sequence alone. All of it takes
at most ten seconds, in order of ascending keys; `Budget` records how far it came.

Where a device plans attention for every new shape (`few_shapes`), every decode pass has the same
number of rows, and one of few numbers of keys. The model runs at each of them, in decode and in
prefill, so that no response waits for a plan.

Depends on neither blocks nor sequences. A passing probe does not prove that other contexts use the
same kernels; `thresholds.py` explains why they should.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from paceline.decoding.types import Logits
from paceline.engines.rows import RowRange, RowRules
from paceline_mlx.caches import SlidingCache, is_recurrent, kernel_by_position, leaves
from paceline_mlx.hooks import Array
from paceline_mlx.model import LoadedModel
from paceline_mlx.rows import (
    CONTEXTS,
    FEW_SHAPES,
    MODEL_CONTEXTS,
    SHARE,
    TRIED,
    Budget,
    Call,
    RowBits,
    attention_calls,
    candidates,
    max_shared_sequences,
    measure_rules,
    model_contexts,
    shares,
)
from paceline_mlx.states import States
from paceline_mlx.thresholds import CAPACITIES, FEW_ROWS, MAX_ROWS, THRESHOLDS, dropped

_PREFIX = 48
"""Computed tokens at the start of a long context; the rest has random keys."""

_TOKENS = 32
"""Token ids that every model has; the vocabulary size is not known yet."""

_QUERIES, _DRAWN = 64, 4096
"""Periods of random queries, and of random keys and values, in positions."""

_ATTENTION_SECONDS = 4.0  # of the budget


class AttentionShapes(NamedTuple):
    """The shapes that one kind of layer passes to `scaled_dot_product_attention`."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: Any
    scale: float
    sinks: Array | None


def choose_rows(model: LoadedModel, context_length: int, budget: Budget) -> RowRules | None:
    """Return the first candidate whose forward passes are all bit-identical.

    Return None if there is none, if a row's position does not determine its kernel, or if the
    budget ended before the first context was checked.
    """
    slots = [cache for cache in leaves(model.empty().caches) if not is_recurrent(cache)]
    if context_length >= THRESHOLDS[0] and not all(map(kernel_by_position, slots)):
        return None
    if model.few_shapes:
        return _few_shapes(model, context_length, budget)
    try:
        return _candidate(model, context_length, budget)
    except TimeoutError:
        budget.keys = 0
        return None


def _few_shapes(model: LoadedModel, context_length: int, budget: Budget) -> RowRules | None:
    """Return `FEW_SHAPES` if rows are bit-identical wherever they are in a pass, else None."""
    for shorter in (keys for keys in (0, *CAPACITIES) if keys < context_length):
        if shorter and budget.left() < 0:
            budget.keys = shorter
            break
        context = max(min(shorter + _PREFIX, context_length - 2 * FEW_ROWS[0]), 1)
        calls = _Calls(model, [context], context_length, budget)
        if measure_rules(calls, [FEW_SHAPES]) is None:
            return None
    return FEW_SHAPES


def _candidate(model: LoadedModel, context_length: int, budget: Budget) -> RowRules | None:
    """Return the first of `CANDIDATES` whose passes are all bit-identical, or None."""
    states = model.empty()
    with _recorded() as calls:
        _evaluate(states, model.call(states, [0, 0], drafted=True).logits)
    slots = [cache for cache in leaves(states.caches) if not is_recurrent(cache)]
    # One call per kind: sinks have different values in every layer.
    kinds = list({str(call._replace(sinks=None)): call for call in calls}.values())
    unfused = len(calls) < len(slots)  # some layers compute attention with matrix products
    windows = {cache.max_size if isinstance(cache, SlidingCache) else None for cache in slots}
    pairs = [*product(kinds, windows)]
    rules = candidates(
        # A model that cannot drop padding after a pass would run its rows again in another one.
        drops_padding=states.accept(1) == 1,
        fused=lambda rows: not unfused and all(_fused(kind, rows) for kind in kinds),
        attention=[
            _attention_bits(kind, window, context_length, budget, _ATTENTION_SECONDS / len(pairs))
            for kind, window in pairs
        ],
    )
    contexts = model_contexts(context_length, CONTEXTS if unfused else MODEL_CONTEXTS)
    compared = _Calls(model, contexts, context_length, budget)
    chosen = measure_rules(compared, rules)
    if unfused and compared.context < contexts[-1]:
        budget.keys = min(budget.keys, compared.context)
    return chosen


class _Calls:
    """Forward passes after contexts that are random after `_PREFIX` tokens; see `measure_rules`."""

    def __init__(
        self, model: LoadedModel, contexts: Sequence[int], context_length: int, budget: Budget
    ) -> None:
        self.contexts, self.room = contexts, context_length
        self._model, self._budget = model, budget
        count = _PREFIX + 2 * MAX_ROWS
        self._tokens = np.random.default_rng(0).integers(0, _TOKENS, count).tolist()

    def prefill(self, length: int) -> None:
        self._states = self._model.empty()
        self.context = length
        prefix = self._tokens[: min(length, _PREFIX)]
        _evaluate(self._states, self._model.call(self._states, prefix).logits)
        if length > len(prefix):
            self._states.stretch(length - len(prefix))
        if self._model.few_shapes:  # also plan the shape of a prompt after this context
            _evaluate(self._states, self._model.call(self._states, [0] * FEW_ROWS[-1]).logits)
            self._states.roll_back(length)

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        """Run `count` rows. Raises TimeoutError if the number of shapes is unlimited."""
        if self._budget.left() < 0 and not self._model.few_shapes:
            raise TimeoutError
        held = self._states.accept(length)
        assert held == length, f"{held} tokens were left of {length}"
        at = min(self.context, _PREFIX) + length - self.context
        called = self._model.call(self._states, self._tokens[at : at + count], drafted=True)
        _evaluate(self._states, called.logits)
        return _on_host(called.logits[:outputs])


def choose_together(model: LoadedModel, rows: RowRange, context_length: int, budget: Budget) -> int:
    """Return the most rows that several sequences may share in a bit-identical forward pass.

    This is the largest of `TOTALS` such that it and all smaller ones agree. It is 1 if none does,
    if the model does not support shared passes, or if the budget has ended. `rows`: per sequence.
    """
    if not model.mixers or budget.left() < 0:
        return 1
    alone = [
        _alone(model, rows, number, context_length) for number in range(len(shares(rows, MAX_ROWS)))
    ]

    def agrees(counts: list[int]) -> bool:
        if budget.left() < 0:
            return False
        pairs = list(zip(alone, counts, strict=False))
        parts = [(one.states.fork(one.states.held), one.tokens[:count]) for one, count in pairs]
        try:
            calls = model.call_together(parts, min_rows=rows.min_rows)
        except Exception:  # of any type: the model's code does not expect such caches
            return False
        for (states, _), called in zip(parts, calls, strict=True):
            _evaluate(states, called.logits)
        return [_bits(called.logits) for called in calls] == [
            one.bits[:count] for one, count in pairs
        ]

    return max_shared_sequences(rows, agrees)


class _Alone(NamedTuple):
    """A short sequence, and the bits of its next tokens in a forward pass of their own."""

    states: States
    tokens: list[int]
    bits: list[bytes]


def _alone(model: LoadedModel, rows: RowRange, number: int, context_length: int) -> _Alone:
    """Create sequence `number`; sequences differ in length and tokens."""
    max_rows = min(rows.max_rows, SHARE)
    length = max(min(3 + 5 * number % 13, context_length - max_rows), 1)
    rng = np.random.default_rng(number)
    tokens, prompt = (rng.integers(0, _TOKENS, count).tolist() for count in (max_rows, length))
    states = model.empty()
    _evaluate(states, model.call(states, prompt).logits)
    other = states.fork(states.held)
    called = model.call(other, tokens, min_rows=rows.min_rows, drafted=True)
    _evaluate(other, called.logits)
    return _Alone(states, tokens, _bits(called.logits))


def _attention_bits(
    kind: AttentionShapes, window: int | None, context_length: int, budget: Budget, seconds: float
) -> RowBits:
    """Return the bits of attention with random queries, keys and values, the same in all calls.

    Positions not reached in `seconds` are left out; the budget records the first of them.
    """
    end = budget.left() - seconds
    calls = attention_calls(context_length, window)
    length = max(count + position for count, position in calls)
    seeds = mx.random.split(mx.random.key(0), 3)

    def drawn(seed: Array, heads: int, size: int, period: int, rows: int) -> Array:
        array = mx.random.normal([1, heads, min(period, rows), size], kind.dtype, key=seed)
        return mx.tile(array, [1, 1, -(-rows // period), 1])

    queries = drawn(seeds[0], kind.heads, kind.key_size, _QUERIES, 2 * _QUERIES)
    keys = drawn(seeds[1], kind.kv_heads, kind.key_size, _DRAWN, length)
    values = drawn(seeds[2], kind.kv_heads, kind.value_size, _DRAWN, length)
    mx.eval(queries, keys, values)
    bits: dict[Call, Sequence[bytes]] = {}
    for count, position in calls:
        if budget.left() < end and count == TRIED[0]:  # compare a position in full or not at all
            budget.keys = min(budget.keys, position)
            break
        front = 0 if window is None else dropped(window, position)
        held = slice(front, position + count)
        first = position % _QUERIES
        rows = mx.fast.scaled_dot_product_attention(
            queries[:, :, first : first + count],
            keys[:, :, held],
            values[:, :, held],
            scale=kind.scale,
            mask=_mask(window, position - front, count),
            sinks=kind.sinks,
        )
        bits[count, position] = _bits(rows[0].swapaxes(0, 1))
    mx.clear_cache()
    return bits


def _mask(window: int | None, held: int, count: int) -> Any:
    """Return the caches' mask for a forward pass of `count` rows."""
    cache: Any = KVCache() if window is None else SlidingCache(window)
    getattr(cache, "slots", cache).offset = held
    return cache.make_mask(count, window_size=None, return_array=False)


def _fused(kind: AttentionShapes, rows: int) -> bool:
    """Return True if one kernel computes attention of `rows` rows; always True on a CPU."""
    if mx.default_device() == mx.cpu:
        return True
    queries = mx.zeros([1, kind.heads, rows, kind.key_size], kind.dtype)
    keys = mx.zeros([1, kind.kv_heads, rows, kind.key_size], kind.dtype)
    values = mx.zeros([1, kind.kv_heads, rows, kind.value_size], kind.dtype)
    options = {"scale": kind.scale, "mask": "causal", "sinks": kind.sinks, "force_fused": True}
    try:
        mx.eval(mx.fast.scaled_dot_product_attention(queries, keys, values, **options))
    except (TypeError, ValueError):  # MLX lacks that option, or there is no such kernel
        return False
    return True


@contextmanager
def _recorded() -> Iterator[list[AttentionShapes]]:
    """Record calls of MLX's attention in the list that is yielded."""
    original = mx.fast.scaled_dot_product_attention
    calls: list[AttentionShapes] = []

    def recorded(q: Array, k: Array, v: Array, **options: Any) -> Array:
        shapes = (q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        calls.append(AttentionShapes(*shapes, q.dtype, options["scale"], options.get("sinks")))
        return original(q, k, v, **options)

    mx.fast.scaled_dot_product_attention = recorded
    try:
        yield calls
    finally:
        mx.fast.scaled_dot_product_attention = original


def _bits(rows: Array) -> list[bytes]:
    return [row.tobytes() for row in _on_host(rows)]


def _on_host(rows: Array) -> Logits:
    return np.array(rows.astype(mx.float32))


def _evaluate(states: States, *also: Any) -> None:
    mx.eval(states.arrays(), also)
