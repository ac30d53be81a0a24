"""Bits of rows on this machine: of the loaded model, and of its attention alone.

The whole model is called after a short and a long context, in calls of several numbers of rows.
Attention is also called by itself, as the model calls it but with random keys, at contexts up to
66,000 and around the numbers of keys where MLX may change kernels: that takes a layer's memory.
Then calls of several sequences are compared with those of each sequence alone. All of it takes ten
seconds at most, by ascending keys; `Budget` has how far it came.

Where a device plans each shape of attention anew (`few_shapes`), every call of an answer has one
number of rows, and one of few numbers of keys. The whole model is called at each of them, for an
answer and for a prompt, so that none is planned on the way of an answer.

Independent of blocks and sequences. What a passing probe does not prove: that another context than
those takes no kernel of its own. `thresholds.py` has why it should not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from paceline.decoding.types import Logits
from paceline.engines.rows import RowRange, RowRules, measure_rules
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
    model_contexts,
    most_together,
    shares,
)
from paceline_mlx.states import States
from paceline_mlx.thresholds import CAPACITIES, FEW_ROWS, MOST_ROWS, THRESHOLDS, dropped

_PREFIX = 48
"""Computed tokens before a long random context."""

_TOKENS = 32
"""Every model has these, and the vocabulary's size is not known yet."""

_QUERIES, _DRAWN = 64, 4096
"""Positions after which queries repeat, and keys and values."""

_ATTENTION_SECONDS = 4.0  # of the budget


class AttentionShapes(NamedTuple):
    """Shapes of one kind of the model's attention, as it calls `scaled_dot_product_attention`."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: Any
    scale: float
    sinks: Array | None


def choose_rows(model: LoadedModel, context_length: int, budget: Budget) -> RowRules | None:
    """The first candidate for which every call gives equal bits.

    None: no candidate does, or the position of a row does not decide which kernel it takes, or
    the time of the budget was too short for the first context.
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
    """`FEW_SHAPES` if rows have the same bits at other places of a call, at each capacity."""
    for shorter in (keys for keys in (0, *CAPACITIES) if keys < context_length):
        if shorter and budget.left() < 0:
            budget.keys = shorter
            break
        context = max(min(shorter + _PREFIX, context_length - 2 * FEW_ROWS[0]), 1)
        calls = _Calls(model, [context], context_length, budget)
        if measure_rules(calls, [FEW_SHAPES._replace(prefill=FEW_SHAPES.decode)]) is None:
            return None
    return FEW_SHAPES


def _candidate(model: LoadedModel, context_length: int, budget: Budget) -> RowRules | None:
    """The first of `CANDIDATES` for which every call gives equal bits, or None."""
    states = model.empty()
    with _recorded() as calls:
        _evaluate(states, model.call(states, [0, 0], drafted=True).logits)
    slots = [cache for cache in leaves(states.caches) if not is_recurrent(cache)]
    # One call of every kind: sinks have other values in every layer.
    kinds = list({str(call._replace(sinks=None)): call for call in calls}.values())
    unfused = len(calls) < len(slots)  # some layers compute attention with products of their own
    windows = {cache.max_size if isinstance(cache, SlidingCache) else None for cache in slots}
    pairs = [*product(kinds, windows)]
    rules = candidates(
        # A model that cannot drop padding after a call would run its rows again in another one.
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
    """Calls of the whole model after contexts that are random from `_PREFIX` on; see `Prober`."""

    sizes: Sequence[int] = TRIED

    def __init__(
        self, model: LoadedModel, contexts: Sequence[int], context_length: int, budget: Budget
    ) -> None:
        self.contexts, self.room = contexts, context_length
        self._model, self._budget = model, budget
        count = _PREFIX + 2 * MOST_ROWS
        self._tokens = np.random.default_rng(0).integers(0, _TOKENS, count).tolist()

    def prefill(self, length: int, rows: RowRange) -> None:
        self._states = self._model.empty()
        self.context = length
        prefix = self._tokens[: min(length, _PREFIX)]
        _evaluate(self._states, self._model.call(self._states, prefix).logits)
        if length > len(prefix):
            self._states.stretch(length - len(prefix))
        if self._model.few_shapes:  # plan the shape of a prompt after this context, too
            _evaluate(self._states, self._model.call(self._states, [0] * FEW_ROWS[-1]).logits)
            self._states.roll_back(length)

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        """See `Prober.rows`. Raises TimeoutError where the number of shapes has no bound."""
        if self._budget.left() < 0 and not self._model.few_shapes:
            raise TimeoutError
        held = self._states.accept(length)
        assert held == length, f"{held} tokens were left of {length}"
        at = min(self.context, _PREFIX) + length - self.context
        called = self._model.call(self._states, self._tokens[at : at + count], drafted=True)
        _evaluate(self._states, called.logits)
        return _on_host(called.logits[:outputs])


def choose_together(model: LoadedModel, rows: RowRange, context_length: int, budget: Budget) -> int:
    """Most rows of a call of several sequences that gives each the bits of a call of its own.

    The last of `TOTALS` up to which all calls agree; 1 if none does, if the model cannot be called
    so, or without time. `rows` are those of a sequence in a call.
    """
    if not model.mixers or budget.left() < 0:
        return 1
    alone = [
        _alone(model, rows, number, context_length)
        for number in range(len(shares(rows, MOST_ROWS)))
    ]

    def agrees(counts: list[int]) -> bool:
        if budget.left() < 0:
            return False
        pairs = list(zip(alone, counts, strict=False))
        parts = [(one.states.fork(one.states.held), one.tokens[:count]) for one, count in pairs]
        try:
            calls = model.call_together(parts, min_rows=rows.least)
        except Exception:  # of any type: code of the model got what it does not expect
            return False
        for (states, _), called in zip(parts, calls, strict=True):
            _evaluate(states, called.logits)
        return [_bits(called.logits) for called in calls] == [
            one.bits[:count] for one, count in pairs
        ]

    return most_together(rows, agrees)


class _Alone(NamedTuple):
    """A short sequence, and the bits of its next tokens in a call of its own."""

    states: States
    tokens: list[int]
    bits: list[bytes]


def _alone(model: LoadedModel, rows: RowRange, number: int, context_length: int) -> _Alone:
    """Sequences of different numbers differ in length and tokens."""
    max_rows = min(rows.most, SHARE)
    length = max(min(3 + 5 * number % 13, context_length - max_rows), 1)
    rng = np.random.default_rng(number)
    tokens, prompt = (rng.integers(0, _TOKENS, count).tolist() for count in (max_rows, length))
    states = model.empty()
    _evaluate(states, model.call(states, prompt).logits)
    other = states.fork(states.held)
    called = model.call(other, tokens, min_rows=rows.least, drafted=True)
    _evaluate(other, called.logits)
    return _Alone(states, tokens, _bits(called.logits))


def _attention_bits(
    kind: AttentionShapes, window: int | None, context_length: int, budget: Budget, seconds: float
) -> RowBits:
    """Bits of attention with random queries, keys and values, the same for all calls.

    Of positions that are reached in `seconds`; the budget has how far that is.
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
        if budget.left() < end and count == TRIED[0]:  # positions are compared whole
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
    """The mask of a call of `count` rows, as the caches make it."""
    cache: Any = KVCache() if window is None else SlidingCache(window)
    getattr(cache, "slots", cache).offset = held
    return cache.make_mask(count, window_size=None, return_array=False)


def _fused(kind: AttentionShapes, rows: int) -> bool:
    """True if one kernel computes attention of `rows` rows; on a CPU, where none does, True too."""
    if mx.default_device() == mx.cpu:
        return True
    queries = mx.zeros([1, kind.heads, rows, kind.key_size], kind.dtype)
    keys = mx.zeros([1, kind.kv_heads, rows, kind.key_size], kind.dtype)
    values = mx.zeros([1, kind.kv_heads, rows, kind.value_size], kind.dtype)
    options = {"scale": kind.scale, "mask": "causal", "sinks": kind.sinks, "force_fused": True}
    try:
        mx.eval(mx.fast.scaled_dot_product_attention(queries, keys, values, **options))
    except (TypeError, ValueError):  # an MLX without that option, or no such kernel
        return False
    return True


@contextmanager
def _recorded() -> Iterator[list[AttentionShapes]]:
    """Append the calls of MLX's attention, as they come, to the list that it yields."""
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
