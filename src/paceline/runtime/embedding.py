"""An embedding in progress: the blocks of a text, and the vector of their hidden states.

It is a `Job` like an answer, so that both share forward passes. Invariant: the vector does not
depend on how the text was cut into blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import FINAL_NORM, Block, Step, tap_name
from paceline.engines.base import KVSequence, StepResult
from paceline.models import Pooling
from paceline.runtime.answer import PrefillJob

NO_EMBEDDINGS = (  # for other models
    "makes no embeddings; take an embedding model whose GGUF file names its pooling (mean, first "
    "or last) and whose attention is causal, such as Qwen3-Embedding"
)


class Embedding(NamedTuple):
    vector: npt.NDArray[np.float32]  # [d], of length 1
    tokens: int  # of the text


class EmbeddingJob(PrefillJob):
    """The blocks of one text, and its vector once all have run."""

    def __init__(self, sequence: KVSequence, tokens: Sequence[int], pooling: Pooling) -> None:
        """Run `tokens`, at least one, in an empty `sequence` of an engine with `FINAL_NORM`."""
        super().__init__(sequence, tokens)
        self._pooling = pooling
        self._block: Sequence[int] = ()
        self._sum: npt.NDArray[np.float64] | None = None

    def next_block(self, max_rows: int | None = None) -> Block:
        """Return a block of the next tokens, at most `max_rows`; none of its rows needs logits."""
        start = self.sequence.length
        self._block = self.tokens[start:][:max_rows]
        return Block(self._block, 0, prefill=True)

    def accept(self, rows: StepResult, place: int) -> Step:
        """Pool the block's hidden states. The step is empty: `result` holds the vector."""
        hidden = rows.taps[place][tap_name(FINAL_NORM)]
        start = self.sequence.length
        self.sequence.commit(len(self._block))
        if self._pooling == "mean":
            for row in hidden:  # one by one, so that the sum does not depend on the blocks
                self._sum = row + (0.0 if self._sum is None else self._sum)
        elif self._pooling == "last" or not start:
            self._sum = hidden[-1 if self._pooling == "last" else 0].astype(np.float64)
        if self.sequence.length == self.count:
            assert self._sum is not None
            self.result = Embedding(normalized(self._sum), self.count)
        return Step(len(self._block))


def normalized(vector: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Return the vector divided by its length, [d] float32; one of length 0 unchanged."""
    wide = vector.astype(np.float64)
    return (wide / (float(np.linalg.norm(wide)) or 1.0)).astype(np.float32)
