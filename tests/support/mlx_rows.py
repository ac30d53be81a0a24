"""Rows of a text from the mlx engine."""

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from paceline.decoding.types import Block
from paceline_mlx.engine import MlxEngine
from paceline_mlx.kv_sequence import MlxSequence
from support import mlx

TEXT = [(7 * i + i * i) % mlx.VOCAB for i in range(40)]


def rows_of(engine: MlxEngine, text: Sequence[int], cuts: Sequence[int]) -> np.ndarray:
    rows, at = [], 0
    with closing(engine.open()) as sequence:
        for count in cuts:
            rows.append(step(engine, sequence, text[at : at + count]))
            sequence.commit(count)
            at += count
    assert at == len(text)
    return np.concatenate(rows)


def step(engine: MlxEngine, sequence: MlxSequence, block: Sequence[int]) -> np.ndarray:
    return engine.step([(sequence, Block(block, len(block)))]).logits[0]
