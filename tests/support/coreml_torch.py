"""Whole models of a family in torch, block by block: the reference for converted shards."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.layers import LayerInputs
from paceline_coreml.conversion.torch_model import torch_inputs
from paceline_coreml.engine.classifier import packed_inputs
from paceline_coreml.engine.inputs import CallInputs


class TorchOutput(NamedTuple):
    """Outputs of one block."""

    streams: Sequence[np.ndarray]
    """After every layer, [T, stream_size]."""
    logits: np.ndarray
    """[T, vocab]; of a token classifier [T, labels]."""


class TorchModel:
    """All layers of a causal language model, and the length of its sequence."""

    def __init__(self, family: Family, *, slots: int, rows: int) -> None:
        """Load all layers, for blocks of up to `rows` rows."""
        self.family = family
        self.length = 0
        """Committed rows."""
        self._stack = _Stack(family)
        self._slots, self._rows, self._tables = slots, rows, family.rope_tables()

    @torch.no_grad()
    def step(self, tokens: Sequence[int], *, width: int | None = None) -> TorchOutput:
        """Run tokens after the committed ones in a call of `width` rows, padded if they are fewer.

        Call `keep` next.
        """
        width = width or len(tokens)
        lags = self.family.shape.lags
        rows = CallInputs(
            width, *self._tables, conv_slots=self._rows + lags if lags else 0, lags=lags
        )
        return self._stack.run(tokens, torch_inputs(rows.at(self.length, len(tokens))))

    def keep(self, rows: int) -> None:
        """Commit the first rows of the last block."""
        self.length += rows


class TorchClassifier:
    """All layers of a token classifier, which is stateless."""

    def __init__(self, family: Family) -> None:
        """Load all layers."""
        self._stack, self._tables = _Stack(family), family.rope_tables()
        self._window = family.shape.window

    @torch.no_grad()
    def read(self, texts: Sequence[Sequence[int]], *, width: int | None = None) -> TorchOutput:
        """Run whole texts, concatenated, in a call of `width` rows, padded if they are fewer."""
        tokens = [token for text in texts for token in text]
        lengths = [len(text) for text in texts]
        arrays = packed_inputs(*self._tables, lengths, width or len(tokens), self._window)
        return self._stack.run(tokens, torch_inputs(arrays))


class _Stack:
    """Embeddings, all layers and the head."""

    def __init__(self, family: Family) -> None:
        self._shape, self._embeddings = family.shape, family.embeddings()
        self._layers = [family.layer(index).eval() for index in range(family.shape.layers)]
        self._final, self._head = family.final(), family.head()

    def run(self, tokens: Sequence[int], inputs: LayerInputs) -> TorchOutput:
        """One call with the rows of `inputs`; rows after the tokens are padding."""
        shape, rows = self._shape, len(tokens)
        stream = torch.zeros(1, shape.stream_size, len(inputs.cos), 1)
        stream[0, : shape.hidden_size, :rows, 0] = self._embeddings[list(tokens)].T
        streams = []
        for layer in self._layers:
            stream = layer(stream, inputs)
            streams.append(stream[0, :, :rows, 0].T.numpy().copy())
        out = self._final(stream)[0, :, :rows, 0].T
        return TorchOutput(streams, (out if self._head is None else out @ self._head.T).numpy())
