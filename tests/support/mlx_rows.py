"""Rows of a text from the mlx engine."""

from collections.abc import Sequence

import numpy as np

from paceline.decoding.types import Block
from paceline_mlx.engine import MlxEngine
from paceline_mlx.kv_sequence import MlxSequence
from support import mlx

TEXT = [(7 * i + i * i) % mlx.VOCAB for i in range(40)]


def step(engine: MlxEngine, sequence: MlxSequence, block: Sequence[int]) -> np.ndarray:
    return engine.step([(sequence, Block(block, len(block)))]).logits[0]
