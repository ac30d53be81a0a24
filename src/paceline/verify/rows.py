"""Row invariance: rows do not depend on how they are computed, bit for bit.

The engine computes the same positions in blocks of every length, after prefill in chunks of every
size, from a prefix cache, and in batches. Around contexts where a kernel may change, it computes
them row by row and in blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from paceline.decoding.types import Block
from paceline.engines.base import Engine
from paceline.engines.invariance import BATCH, BLOCK_LENGTH, CHUNKED_PREFILL, PREFIX_CACHE
from paceline.verify.checks import BLOCKS, DoneChecks, Verdict, slots_of

_CONTEXTS = (16, 64, 300, 1000)
_CHUNKS = (2, 3, 16, 31, 64, 100)
_ROWS = max(BLOCKS)

_THRESHOLDS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Numbers of keys where attention may take another kernel."""

_BEFORE = 9
"""Rows before a threshold."""

_SIZES = (2, 3, 5, 8, 16)
"""Rows of the blocks that cross it, one after the other."""

_MOST_PREFILL = 8192
"""Most tokens that are read for a context, where an engine cannot copy KV."""

_PREFILL_ROWS = 512


def check_rows(
    engine: Engine,
    verdict: Verdict,
    *,
    seconds: float = inf,
    watch: Callable[[int], None] = lambda _: None,
) -> DoneChecks:
    """Compare rows of the same positions, computed under every condition, bit for bit.

    Contexts of which two sequences do not fit into the free slots are left out. After `seconds` no
    further context is begun.
    """
    started = perf_counter()
    checks = row_checks(engine)
    done = 0
    for done, check in enumerate(checks, start=1):
        check(verdict)
        watch(done)
        if perf_counter() - started > seconds:
            break
    return DoneChecks(done, len(checks), perf_counter() - started)


def row_checks(engine: Engine) -> list[Callable[[Verdict], None]]:
    """The comparisons at every context that fits, and around every threshold that does."""
    return [
        *(
            partial(_check_context, engine, context)
            for context in _CONTEXTS
            if _fits(engine, context + _ROWS, 2)
        ),
        *(
            partial(_check_threshold, engine, keys)
            for keys in _THRESHOLDS
            if _fits(engine, keys + _ROWS, 1) and keys <= _MOST_PREFILL
        ),
    ]


def _check_context(engine: Engine, context: int, verdict: Verdict) -> None:
    tokens = _random_tokens(engine, context + _ROWS)
    block = tokens[context:]
    with closing(engine.open()) as reference, closing(engine.open()) as other:
        _fill(engine, reference, tokens[:context], context)
        expected = _rows(engine, reference, block)
        for count in (1, *BLOCKS):  # 1: plain decoding
            verdict.add(BLOCK_LENGTH, _rows(engine, reference, block[:count]), expected[:count])
        # The first token of an answer is picked from the last row of a whole prompt.
        first = Block(tokens[: context + 1], 1, prefill=True)
        whole = engine.step([(other, first)]).logits[0].copy()
        for chunk in _CHUNKS:
            other.rewind(0)
            _fill(engine, other, tokens[:context], chunk)
            verdict.add(CHUNKED_PREFILL, _rows(engine, other, block), expected)
            last = Block(block[:1], 1, prefill=True)
            verdict.add(CHUNKED_PREFILL, engine.step([(other, last)]).logits[0], whole)
        other.rewind(context // 2)
        half = Block(tokens[context // 2 : context], 0, prefill=True)
        both = engine.step([(other, half), (reference, Block(block, _ROWS))])
        verdict.add(BATCH, both.logits[1], expected)
        other.commit(len(half.tokens))
        verdict.add(BATCH, _rows(engine, other, block), expected)
        other.close()
        _check_forks(engine, verdict, reference, tokens, context)


def _check_forks(
    engine: Engine, verdict: Verdict, reference: Any, tokens: Sequence[int], context: int
) -> None:
    """Compare rows after prefixes forked from `reference`, which has read `context` tokens."""
    expected = _rows(engine, reference, tokens[context:])
    for shared in (context, context // 2):
        with closing(reference.fork(shared)) as child:
            _fill(engine, child, tokens[child.length : context], context)
            verdict.add(PREFIX_CACHE, _rows(engine, child, tokens[context:]), expected)
    # The next turn of a chat: decoded tokens are part of the prompt.
    turn = context + len(expected) // 2
    for token, row in zip(tokens[context:turn], expected, strict=False):
        verdict.add(BLOCK_LENGTH, _rows(engine, reference, [token]), row[None])
        reference.commit(1)
    with closing(engine.open()) as fresh:
        _fill(engine, fresh, tokens[:turn], turn)
        expected = _rows(engine, fresh, tokens[turn:])
    with closing(reference.fork(turn)) as child:
        _fill(engine, child, tokens[child.length : turn], turn)
        verdict.add(PREFIX_CACHE, _rows(engine, child, tokens[turn:]), expected)


def _check_threshold(engine: Engine, keys: int, verdict: Verdict) -> None:
    context = keys - _BEFORE
    tokens = _random_tokens(engine, context + _ROWS)
    with closing(engine.open()) as sequence:
        _fill(engine, sequence, tokens[sequence.length : context], _PREFILL_ROWS)
        expected = []
        for token in tokens[context:]:
            expected.append(_rows(engine, sequence, [token]))
            sequence.commit(1)
        for size in _SIZES:
            sequence.rewind(context)
            _fill(engine, sequence, tokens[sequence.length : context], _PREFILL_ROWS)
            for part in _chunks(range(_ROWS), size):
                block = [tokens[context + at] for at in part]
                rows = np.concatenate([expected[at] for at in part])
                verdict.add(BLOCK_LENGTH, _rows(engine, sequence, block), rows)
                sequence.commit(len(block))


def _random_tokens(engine: Engine, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, engine.vocab_size, count).tolist()
    return tokens


def _fits(engine: Engine, length: int, sequences: int) -> bool:
    fits = sequences * slots_of(engine, length) <= engine.free_slots
    return fits and length <= engine.context_length


def _chunks(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    # The engine computes at least two rows of a prompt, so a last chunk of one row is valid.
    return (tokens[at : at + size] for at in range(0, len(tokens), size))


def _fill(engine: Engine, sequence: Any, tokens: Sequence[int], chunk: int) -> None:
    for part in _chunks(tokens, chunk):
        engine.step([(sequence, Block(part, 0, prefill=True))])
        sequence.commit(len(part))


def _rows(engine: Engine, sequence: Any, block: Sequence[int]) -> np.ndarray[Any, Any]:
    return engine.step([(sequence, Block(block, len(block)))]).logits[0].copy()
