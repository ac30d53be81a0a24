"""A complete model of a family in torch, block by block: the reference for converted shards."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.shards import layer_inputs
from paceline_coreml.engine.inputs import CallInputs


class TorchOutput(NamedTuple):
    streams: Sequence[np.ndarray]
    """After every layer, [T, stream_size]."""
    logits: np.ndarray
    """[T, vocab]"""


class TorchModel:
    """All layers of a causal language model, and the length of its sequence."""

    def __init__(self, family: Family, *, rows: int) -> None:
        """Load all layers, for blocks of up to `rows` rows."""
        self.length = 0
        """Committed rows."""
        self._shape, self._embeddings = family.shape, family.embeddings()
        self._layers = [family.layer(index).eval() for index in range(family.shape.layers)]
        self._final, self._head = family.final(), family.head()
        self._rows, self._tables = rows, family.rope_tables()

    @torch.no_grad()
    def step(self, tokens: Sequence[int], *, width: int | None = None) -> TorchOutput:
        """Run tokens after the committed ones in a call of `width` rows, padded if they are fewer.

        Call `keep` next.
        """
        width, rows, shape = width or len(tokens), len(tokens), self._shape
        conv_slots = self._rows + shape.lags if shape.lags else 0
        inputs = CallInputs(width, *self._tables, conv_slots=conv_slots, lags=shape.lags)
        arrays = inputs.for_rows(self.length, rows)
        call = layer_inputs({name: torch.from_numpy(array) for name, array in arrays.items()})
        stream = torch.zeros(1, shape.stream_size, width, 1)
        stream[0, : shape.hidden_size, :rows, 0] = self._embeddings[list(tokens)].T
        streams = []
        for layer in self._layers:
            stream = layer(stream, call)
            streams.append(stream[0, :, :rows, 0].T.numpy().copy())
        out = self._final(stream)[0, :, :rows, 0].T
        assert self._head is not None
        return TorchOutput(streams, (out @ self._head.T).numpy())

    def keep(self, rows: int) -> None:
        """Commit the first rows of the last block."""
        self.length += rows
