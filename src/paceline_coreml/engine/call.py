"""One forward pass of an artifact: embeddings go through the layer shards, then rows to the head.

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
from paceline_coreml.engine.packages import Packages

Floats = npt.NDArray[np.float32]


class Bucket:
    """The programs for one number of rows, and their input arrays."""

    def __init__(self, artifact: Artifact, packages: Packages, rows: int, rotary: Floats) -> None:
        """Prepare for passes of `rows` rows; `rotary` is [2, slots, r], cosines and sines."""
        self._artifact, self.packages, self.rows = artifact, packages, rows
        self._inputs = CallInputs(rows, *rotary, conv_slots=artifact.ring, lags=artifact.lags)
        self._stream = np.zeros((1, artifact.stream_size, rows, 1), np.float32)
        self._called: set[str] = set()
        """Paths of packages that have already run with this number of rows."""

    def layers(
        self,
        states: Sequence[Any],
        embeddings: npt.NDArray[Any],
        start: int,
        taps: Sequence[int],
        parts: dict[str, float],
    ) -> tuple[Floats, Mapping[str, Floats]]:
        """Run the layers.

        Args:
            states: the sequence's states, one per layer shard.
            embeddings: [T, hidden_size]; T is at most the bucket's rows.
            start: position of the first row.
            taps: layers whose hidden states to return.
            parts: gets the seconds that packages ran.

        Returns:
            The residual stream after the last layer, [1, stream_size, rows, 1], and
            [T, hidden_size] per tap.
        """
        count, size = embeddings.shape
        self._stream[0, :size, :count, 0] = embeddings.T
        self._stream[0, :size, count:, 0] = 0
        inputs = self._inputs.for_rows(start, count)
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
