"""Runs a family's layers in torch, block by block: the reference for converted shards.

Inputs are those of a shard, from the engine's `CallInputs`; states are the layers' buffers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.layers import LayerInputs
from paceline_coreml.engine.classifier import packed_inputs
from paceline_coreml.engine.inputs import CallInputs

Floats = npt.NDArray[np.float32]


class TorchOutput(NamedTuple):
    """Outputs of one block."""

    streams: Sequence[Floats]
    """After every layer, [T, stream_size]."""
    logits: Floats
    """[T, vocab]; of a token classifier [T, labels]."""


@torch.no_grad()
def run_layers(
    family: Family, layers: range, stream: Floats, *, slots: int, conv_slots: int, rows: int
) -> Floats:
    """Run a text through some layers, of which one at a time is in memory.

    Args:
        family: the model.
        layers: indexes of the layers.
        stream: [n, stream_size], before the first of them.
        slots: the family's.
        conv_slots: the family's.
        rows: rows of a call.

    Returns:
        The stream after the last of them.
    """
    lags, tables = family.shape.lags, family.rope_tables()
    for index in layers:
        layer = family.layer(index).eval()
        inputs = CallInputs(rows, *tables, conv_slots=conv_slots if lags else 0, lags=lags)
        blocks = []
        for start in range(0, len(stream), rows):
            count = min(rows, len(stream) - start)
            block = torch.zeros(1, stream.shape[1], rows, 1)
            block[0, :, :count, 0] = torch.from_numpy(stream[start : start + count].T)
            out = layer(block, _torch_inputs(inputs.at(start, count)))
            blocks.append(out[0, :, :count, 0].T.numpy())
        stream = np.concatenate(blocks)
    return stream


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
        return self._stack.run(tokens, _torch_inputs(rows.at(self.length, len(tokens))))

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
        return self._stack.run(tokens, _torch_inputs(arrays))


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


def layer_inputs(inputs: dict[str, Tensor]) -> LayerInputs:
    """`LayerInputs` from the inputs of a shard, by their names there."""
    return LayerInputs(
        inputs["rope_cos"],
        inputs["rope_sin"],
        inputs["attn_mask"],
        inputs.get("kv_write_mask", _NO_SLOTS),
        inputs.get("window_write"),
        inputs.get("window_read"),
    )


def _torch_inputs(arrays: Mapping[str, Floats]) -> LayerInputs:
    return layer_inputs({name: torch.from_numpy(array) for name, array in arrays.items()})


_NO_SLOTS = torch.zeros(1, 1, 0, 0)
"""A token classifier has no KV cache."""
