"""One call of an artifact: embeddings through the shards of layers, then rows through the head.

Independent of blocks and sequences.
"""

from collections.abc import Mapping, Sequence
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

    def __init__(self, artifact: Artifact, packages: Packages, rows: int, rotary: Floats) -> None:
        """Prepare for calls of `rows` rows; `rotary` is [2, slots, r], cosines and sines."""
        self.artifact, self.packages, self.rows = artifact, packages, rows
        self.inputs = CallInputs(rows, *rotary, conv_slots=artifact.ring, lags=artifact.lags)
        self.stream = np.zeros((1, artifact.stream_size, rows, 1), np.float32)
        self.called: set[str] = set()
        """Paths of the packages that were already called with this number of rows."""


class ArtifactCall:
    def __init__(self, bucket: Bucket, parts: dict[str, float], states: Sequence[Any]) -> None:
        """Adds seconds to `parts`; `states` are the sequence's, one per shard of layers."""
        self._bucket, self._parts, self._states = bucket, parts, states

    def layers(
        self, embeddings: npt.NDArray[Any], start: int, taps: Sequence[int]
    ) -> tuple[Floats, Mapping[str, Floats]]:
        """Run the layers.

        Args:
            embeddings: [T, hidden_size]; T is at most the bucket's rows.
            start: position of the first row.
            taps: layers whose hidden states to return.

        Returns:
            The residual stream after the last layer, [1, stream_size, rows, 1], and
            [T, hidden_size] per tap.
        """
        bucket = self._bucket
        count, size = embeddings.shape
        bucket.stream[0, :size, :count, 0] = embeddings.T
        bucket.stream[0, :size, count:, 0] = 0
        inputs = bucket.inputs.at(start, count)
        stream, tapped = bucket.stream, {}
        shards = bucket.artifact.layer_shards
        for shard, package, state in zip(shards, bucket.packages.layers, self._states, strict=True):
            outputs = self._timed(
                "layers", shard.path, package, {"hidden": stream, **inputs}, state
            )
            stream = outputs["out_hidden"]
            for tap in set(shard.taps) & set(taps):
                tapped[tap_name(tap)] = outputs[shard.output(tap)][0, :size, :count, 0].T
        return stream, tapped

    def head(self, stream: Floats, first: int, logits: Logits, best: Best | None) -> None:
        """Run the head for rows from `first` on.

        Fills `best` [rows] without keeping logits; if it is None, `logits` [rows, vocab].
        """
        bucket = self._bucket
        rows = slice(first, first + len(logits if best is None else best.tokens))
        for shard, package in zip(bucket.artifact.head_shards, bucket.packages.heads, strict=True):
            outputs = self._timed("head", shard.path, package, {"hidden": stream})
            part = outputs["logits"][0, :, rows, 0].T
            if best is None:
                logits[:, shard.start : shard.end] = part
            else:
                keep_best(best, part, shard.start)

    def _timed(
        self, part: str, path: str, package: Package, inputs: Mapping[str, Any], state: Any = None
    ) -> Mapping[str, Floats]:
        started = perf_counter()
        outputs = package.predict(inputs, state)
        if path not in self._bucket.called:
            self._bucket.called.add(path)
            part = "first calls"
        self._parts[part] = self._parts.get(part, 0.0) + perf_counter() - started
        return outputs


def keep_best(best: Best, part: Logits, start: int) -> None:
    """Update `best` with logits of the next part of the vocabulary, [rows, tokens from `start`].

    Parts must come in order, the first with `start` 0. The result equals numpy's argmax: the first
    of equal logits, and NaN above all.
    """
    tokens = part.argmax(axis=1)
    scores = np.take_along_axis(part, tokens[:, None], axis=1)[:, 0]
    higher = (scores > best.scores) | (np.isnan(scores) & ~np.isnan(best.scores))
    if start == 0:
        higher[:] = True
    best.tokens[higher] = tokens[higher] + start
    best.scores[higher] = scores[higher]
