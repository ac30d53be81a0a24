"""Running a family's own layers in torch, block by block: what converted shards are compared with.

The same inputs as a shard gets, made by the engine's own `Rows`. States are the layers' buffers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engines.coreml.classifier import packed_inputs
from paceline.engines.coreml.inputs import CallInputs
from paceline.tools.coreml.family import Family
from paceline.tools.coreml.layers import Step

Floats = npt.NDArray[np.float32]


class Ran(NamedTuple):
    """What one block brought."""

    streams: Sequence[Floats]
    """After each layer, [T, stream_size]."""
    logits: Floats
    """[T, vocab]; a token classifier's [T, labels]."""


class Network:
    """All layers of a family, and where their sequence stands."""

    def __init__(self, family: Family, *, slots: int, rows: int) -> None:
        """Load all layers; blocks may have up to `rows` rows."""
        self.family = family
        self.length = 0
        """Rows that are kept."""
        self._stack = _Stack(family)
        self._slots, self._rows, self._tables = slots, rows, family.tables()

    @torch.no_grad()
    def step(self, tokens: Sequence[int], *, width: int | None = None) -> Ran:
        """Run tokens behind what is kept, in a call of `width` rows (more than tokens: filled up).

        `keep` says afterwards how many of them stay.
        """
        return self._stack.run(tokens, self._step(len(tokens), width or len(tokens)))

    def keep(self, rows: int) -> None:
        """Make the first rows of the last block part of the sequence."""
        self.length += rows

    def _step(self, rows: int, width: int) -> Step:
        lags = self.family.shape.lags
        inputs = CallInputs(
            width, *self._tables, conv_slots=self._rows + lags if lags else 0, lags=lags
        )
        arrays = {name: torch.from_numpy(a) for name, a in inputs.at(self.length, rows).items()}
        return step_of(arrays)


class Classifier:
    """All layers of a token classifier, which keeps nothing between calls."""

    def __init__(self, family: Family) -> None:
        """Load all layers."""
        self._stack, self._tables, self._reach = _Stack(family), family.tables(), family.shape.reach

    @torch.no_grad()
    def read(self, texts: Sequence[Sequence[int]], *, width: int | None = None) -> Ran:
        """Read whole texts, one behind the other, in a call of `width` rows (more: filled up)."""
        tokens = [token for text in texts for token in text]
        lengths = [len(text) for text in texts]
        arrays = packed_inputs(*self._tables, lengths, width or len(tokens), self._reach)
        step = step_of({name: torch.from_numpy(array) for name, array in arrays.items()})
        return self._stack.run(tokens, step)


class _Stack:
    """Embeddings, all layers and the head."""

    def __init__(self, family: Family) -> None:
        self._shape, self._embeddings = family.shape, family.embeddings()
        self._layers = [family.layer(index).eval() for index in range(family.shape.layers)]
        self._final, self._head = family.final(), family.head()

    def run(self, tokens: Sequence[int], step: Step) -> Ran:
        """One call, of as many rows as `step` speaks of; those without a token fill it up."""
        shape, rows = self._shape, len(tokens)
        stream = torch.zeros(1, shape.stream_size, len(step.cos), 1)
        stream[0, : shape.hidden_size, :rows, 0] = self._embeddings[list(tokens)].T
        streams = []
        for layer in self._layers:
            stream = layer(stream, step)
            streams.append(stream[0, :, :rows, 0].T.numpy().copy())
        out = self._final(stream)[0, :, :rows, 0].T
        return Ran(streams, (out if self._head is None else out @ self._head.T).numpy())


def step_of(inputs: dict[str, Tensor]) -> Step:
    """The inputs of a shard, by their names there."""
    return Step(
        inputs["rope_cos"],
        inputs["rope_sin"],
        inputs["attn_mask"],
        inputs.get("kv_write_mask", _NOWHERE),
        inputs.get("window_write"),
        inputs.get("window_read"),
    )


_NOWHERE = torch.zeros(1, 1, 0, 0)
"""What a token classifier writes: it has no slots."""
