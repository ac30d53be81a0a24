"""Calls of any engine, and bitwise comparison of their logits."""

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from paceline.decoding.types import Block
from paceline.engines.base import Engine, KVSequence
from paceline.engines.exact import BLOCK_LENGTH, measure_invariance
from paceline.verify.checks import Verdict, row_checks, run_checks

Rows = np.ndarray
Plain = Callable[[Sequence[int], int], Rows]
Work = tuple[KVSequence, Sequence[int], int]


def random_text(engine: Engine, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, engine.vocab_size, length).tolist()


def run(engine: Engine, *work: Work, prompts: Sequence[Work] = ()) -> list[Rows]:
    """The logits of one call with blocks of answers, then of prompts, kept beyond the next call."""
    blocks = [(sequence, Block(tokens, rows)) for sequence, tokens, rows in work]
    blocks += [(sequence, Block(tokens, rows, prefill=True)) for sequence, tokens, rows in prompts]
    return [logits.copy() for logits in engine.step(blocks).logits]


def feed(engine: Engine, sequence: KVSequence, tokens: Sequence[int]) -> None:
    if tokens:
        run(engine, prompts=[(sequence, tokens, 0)])
        sequence.commit(len(tokens))


def rows_of(engine: Engine, text: Sequence[int], cuts: Sequence[int]) -> Rows:
    """The logits of every row of a text, run in blocks of these lengths."""
    rows = list[Rows]()
    with closing(engine.open()) as sequence:
        for count in cuts:
            rows += run(engine, (sequence, text[sequence.length :][:count], count))
            sequence.commit(count)
        assert sequence.length == len(text)
    return np.concatenate(rows)


def same(rows: Rows, expected: Rows) -> bool:
    return rows.shape == expected.shape and rows.tobytes() == expected.tobytes()


def differing(engine: Engine) -> tuple[int, int]:
    """Rows that differ by block length, as each of the two checks counts them."""
    verdict = Verdict()
    run_checks(row_checks(engine, verdict))
    measured = measure_invariance(engine, (BLOCK_LENGTH,))
    return verdict.conditions[BLOCK_LENGTH].differing, measured[BLOCK_LENGTH].differing
