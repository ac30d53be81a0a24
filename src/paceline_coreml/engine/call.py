"""One forward pass of an artifact: embeddings go through the layer shards, then rows to the head.

`run_package` runs a whole text through one shard.

Depends on neither blocks nor sequences.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Best, Logits, tap_name
from paceline_coreml.engine.artifact import Artifact
from paceline_coreml.engine.inputs import CallInputs
from paceline_coreml.engine.packages import Package, Packages

Floats = npt.NDArray[np.float32]


class Bucket:
    """The programs for one number of rows, and their input arrays."""

    def __init__(self, artifact: Artifact, packages: Packages, rows: int) -> None:
        """Prepare for passes of `rows` rows."""
        self._artifact, self.packages, self.rows = artifact, packages, rows
        self._stream = np.zeros((1, artifact.stream_size, rows, 1), np.float32)
        self._called: set[str] = set()
        """Paths of packages that have already run with this number of rows."""

    def layers(
        self,
        states: Sequence[Any],
        embeddings: npt.NDArray[Any],
        inputs: Mapping[str, Floats],
        taps: Sequence[int],
        parts: dict[str, float],
    ) -> tuple[Floats, Mapping[str, Floats]]:
        """Run the layers on embeddings [T, hidden_size], with the other inputs of the pass.

        `states` has one state per layer shard; `parts` gets the seconds that packages ran. Returns
        the residual stream after the last layer, [1, stream_size, rows, 1], and [T, hidden_size]
        for each layer of `taps`.
        """
        count, size = embeddings.shape
        self._stream[0, :size, :count, 0] = embeddings.T
        self._stream[0, :size, count:, 0] = 0
        stream, tapped = self._stream, {}
        shards = self._artifact.layer_shards
        for shard, package, state in zip(shards, self.packages.layers, states, strict=True):
            with self._timed("layers", shard.path, parts):
                outputs = package.predict({"hidden": stream, **inputs}, state)
            stream = outputs["out_hidden"]
            for tap in set(shard.taps) & set(taps):
                tapped[tap_name(tap)] = outputs[shard.output(tap)][0, :size, :count, 0].T
        return stream, tapped

    def head(
        self, stream: Floats, first: int, logits: Logits, best: Best | None, parts: dict[str, float]
    ) -> None:
        """Run the head for rows starting at `first`.

        Fills `best` [rows] without storing logits or, if it is None, `logits` [rows, vocab].
        """
        rows = slice(first, first + len(logits if best is None else best.tokens))
        for shard, package in zip(self._artifact.head_shards, self.packages.heads, strict=True):
            with self._timed("head", shard.path, parts):
                outputs = package.predict({"hidden": stream})
            part = outputs["logits"][0, :, rows, 0].T
            if best is None:
                logits[:, shard.start : shard.end] = part
            else:
                keep_best(best, part, shard.start)

    @contextmanager
    def _timed(self, part: str, path: str, parts: dict[str, float]) -> Iterator[None]:
        started = perf_counter()
        yield
        if path not in self._called:
            self._called.add(path)
            part = "first calls"
        parts[part] = parts.get(part, 0.0) + perf_counter() - started


def keep_best(best: Best, part: Logits, start: int) -> None:
    """Update `best` with logits of the next part of the vocabulary, [rows, tokens from `start`].

    Parts must come in order; the first has `start` 0. The result equals numpy's argmax: the first
    of equal logits wins, and NaN wins over all numbers.
    """
    tokens = part.argmax(axis=1)
    scores = np.take_along_axis(part, tokens[:, None], axis=1)[:, 0]
    higher = (scores > best.scores) | (np.isnan(scores) & ~np.isnan(best.scores))
    if start == 0:
        higher[:] = True
    best.tokens[higher] = tokens[higher] + start
    best.scores[higher] = scores[higher]


def run_package(
    package: Package,
    stream: Floats,
    width: int,
    inputs: CallInputs | None,
    *,
    rows: int | None = None,
) -> dict[str, Floats]:
    """Run a whole text, [T, stream_size], through one package; return output -> [T, channels].

    A pass has `width` rows: `rows` of the text, or all if it is None, then padding. `inputs` is
    None for a head.
    """
    rows = rows or width
    state: Any = None if inputs is None else package.make_state()
    hidden = np.zeros((1, stream.shape[1], width, 1), np.float32)
    parts: dict[str, list[Floats]] = {}
    for at in range(0, len(stream), rows):
        block = stream[at : at + rows]
        count = len(block)
        hidden[0, :, :count, 0] = block.T
        hidden[0, :, count:, 0] = 0
        about = {} if inputs is None else inputs.for_rows(at, count)
        for name, tensor in package.predict({"hidden": hidden, **about}, state).items():
            parts.setdefault(name, []).append(tensor[0, :, :count, 0].T.copy())
    return {name: np.concatenate(blocks) for name, blocks in parts.items()}
