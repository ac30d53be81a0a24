"""Running DFlash with OpenVINO, on the CPU, for a target that OpenVINO or Core ML runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.types import tap_name
from paceline.drafters.dflash.checkpoint import (
    Array,
    read_config,
    read_draft_vocab,
    read_weights,
)
from paceline.drafters.dflash.graph import HIDDEN, Builder
from paceline.drafters.dflash.network import LONG, Context, measured
from paceline.drafters.dflash.target import Target, check_pair, read_target

_STEP = 256
"""Context is attended to in steps of so many rows: another size takes time to prepare."""


class HostRows:
    """Keys and values in the host's memory; it grows by itself."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self._rows: Array = np.zeros((2 * layers, 0, kv_heads, head_dim), np.float32)

    def copy(self) -> "HostRows":
        """The same, for a sequence that goes its own way from here."""
        other = HostRows(0, 0, 0)
        other._rows = self._rows.copy()
        return other

    def first(self, features: Array, count: int) -> Array:
        """The first rows of features."""
        return features[:count]

    def put(self, at: int, rows: Sequence[Array], count: int) -> None:
        """Put `count` rows from `at` on: for each layer keys [n, kv_heads, head_dim], then values.

        Of n rows the first count.
        """
        self._make_room(at + count)
        for kept, new in zip(self._rows, rows, strict=True):
            kept[at : at + count] = new[:count]

    def ending(self, start: int, end: int) -> Array:
        """The rows from `start` to `end`: [2 * layers, size, kv_heads, head_dim].

        A size is usual, and what is beyond the rows is to be masked.
        """
        size = max(-(-(end - start) // _STEP), 1) * _STEP
        self._make_room(start + size)
        return self._rows[:, start : start + size]

    def _make_room(self, rows: int) -> None:
        here = self._rows.shape[1]
        if rows > here:
            kinds, _, *rest = self._rows.shape
            grown = np.zeros((kinds, max(rows, 2 * here), *rest), np.float32)
            grown[:, :here] = self._rows
            self._rows = grown


class DFlash:
    """A checkpoint opened for a target; see `Network`."""

    def __init__(
        self, folder: Path, graph: Path, *, window: int | None = None, int8: bool = True
    ) -> None:
        """Check the pair, build and compile.

        Args:
            folder: a checkpoint in z-lab's form.
            graph: the target's `openvino_model.xml`.
            window: tokens of context that are looked at, at most; None: all.
            int8: keep matrices as 8 bits per output channel; else as float32.

        Raises:
            ModelError: the checkpoint cannot be used, or not with this target.
        """
        import openvino as ov

        self.config = read_config(folder)
        target = read_target(graph)
        check_pair(folder, self.config, target)
        draft_vocab = read_draft_vocab(folder, self.config)
        builder = Builder(self.config, read_weights(folder, self.config), int8=int8)
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if int8 else "0",
        }
        core = ov.Core()
        self._target: Target = target  # its weights are in the graph
        drafting = core.compile_model(builder.draft_graph(target, draft_vocab), "CPU", options)
        reading = core.compile_model(builder.context_graph(), "CPU", options)
        self._drafting = drafting.create_infer_request()
        self._reading = reading.create_infer_request()
        self._window = window
        self._rows = self.config.block_size
        self.taps = self.config.target_layer_ids
        size = self.config.feature_size
        self.cost = measured(self, lambda rows: np.zeros((rows, size), np.float32), window)

    def context(self) -> Context[HostRows]:
        """Room for a new sequence's keys and values."""
        config = self.config
        return Context(
            HostRows(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        )

    def features(self, taps: Mapping[str, Array], rows: int) -> Array:
        """The features of a block's first rows, [rows, taps * d], from what an engine tapped."""
        return np.concatenate([taps[tap_name(tap)][:rows] for tap in self.taps], axis=1)

    def joined(self, parts: Sequence[Array]) -> Array:
        """Features one behind the other; of no parts, no rows."""
        return np.concatenate([np.zeros((0, self.config.feature_size), np.float32), *parts])

    def read(self, context: Context[HostRows], features: Array, start: int) -> None:
        """Add tokens to the context; see `Network`."""
        for at in range(0, len(features), LONG):
            part = features[at : at + LONG]
            positions = range(start + at, start + at + len(part))
            found = self._reading.infer(
                {"features": part, "positions": np.array(positions, np.float32)},
                share_inputs=True,
                share_outputs=True,
            )
            self._keep(context, found, positions)

    def draft(
        self, context: Context[HostRows], token: int, position: int, features: Array, start: int
    ) -> tuple[list[int], list[float]]:
        """Fill a block that begins with `token` at `position`; see `Network`."""
        rows = self._rows
        surplus = len(features) - rows
        if surplus > 0:
            self.read(context, features[:surplus], start)
            features, start = features[surplus:], start + surplus
        new = len(features)
        padded = np.zeros((rows, self.config.feature_size), np.float32)
        padded[:new] = features
        most = len(context) if self._window is None else max(self._window - new, 0)
        first = max(len(context) - most, 0)
        known = context.positions[first:]
        past = context.rows.ending(first, len(context))
        # Rows that only fill up stand at position 0, where the mask hides them.
        positions = np.zeros(2 * rows, np.float32)
        positions[:new] = range(start, start + new)
        positions[rows:] = range(position, position + rows)
        tokens = np.full(rows, self.config.mask_token_id, np.int64)
        tokens[0] = token
        inputs = {"tokens": tokens, "features": padded, "positions": positions}
        seen = np.zeros(past.shape[1] + 2 * rows, bool)
        seen[: len(known)] = True
        seen[past.shape[1] : past.shape[1] + new] = True
        seen[past.shape[1] + rows :] = True
        inputs |= self._masks(seen, known, past.shape[1], positions)
        for at in range(self.config.num_hidden_layers):
            inputs[f"keys.{at}"] = past[2 * at]
            inputs[f"values.{at}"] = past[2 * at + 1]
        found = self._drafting.infer(inputs, share_inputs=True, share_outputs=True)
        drafts, chances = found["drafts"].tolist(), found["chances"].tolist()
        self._keep(context, found, range(start, start + new))
        return drafts, chances

    def _masks(
        self, seen: Any, known: Sequence[int], past: int, positions: Array
    ) -> dict[str, Array]:
        rows, windows = self._rows, self.config.windows
        full = np.where(seen, np.float32(0), np.float32(HIDDEN))
        masks = {}
        if None in windows:
            masks["mask.full"] = np.broadcast_to(full, (rows, len(seen))).copy()
        width = next((window for window in windows if window is not None), None)
        if width is not None:
            places = np.zeros(len(seen), np.float32)
            places[: len(known)] = known
            places[past:] = positions
            far = positions[rows:, None] - places[None] >= width
            masks["mask.window"] = np.where(far, np.float32(HIDDEN), full[None])
        return masks

    def _keep(self, context: Context[HostRows], found: Any, positions: range) -> None:
        """Add the first of the rows that a graph found."""
        rows = [
            found[f"{kind}.{at}"]
            for at in range(self.config.num_hidden_layers)
            for kind in ("new_keys", "new_values")
        ]
        context.rows.put(len(context), rows, len(positions))
        context.positions += positions
