"""Runs DFlash with OpenVINO on the CPU, for a target that OpenVINO or Core ML runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.draft_sampling import DraftSampler
from paceline.decoding.types import tap_name
from paceline.drafters.dflash.chain import ChainHead, Rows
from paceline.drafters.dflash.checkpoint import read_draft_vocab, read_tensors
from paceline.drafters.dflash.config_file import read_config
from paceline.drafters.dflash.graph import MASKED, GraphBuilder
from paceline.drafters.dflash.network import measure_cost
from paceline.drafters.networks.context import PREFILL_CHUNK, ContextCache
from paceline.drafters.networks.padding import padded_rows, padded_size
from paceline.drafters.networks.target import TargetWeights, check_pair, read_target
from paceline.drafters.networks.tensors import Array
from paceline.storage.openvino import core

_BUCKET = 256
"""Rows by which the context input grows: OpenVINO compiles every new size."""


class HostKV:
    """Keys and values in host memory, float32; grows when written to."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self._rows: Array = np.zeros((2 * layers, 0, kv_heads, head_dim), np.float32)

    def copy(self) -> "HostKV":
        """An independent copy."""
        duplicate = HostKV(0, 0, 0)
        duplicate._rows = self._rows.copy()
        return duplicate

    def first(self, tapped: Array, count: int) -> Array:
        """The first `count` rows of pending hidden states."""
        return tapped[:count]

    def write(self, at: int, rows: Sequence[Array], count: int) -> None:
        """Write `count` rows from row `at` on.

        `rows` has keys, then values [n >= count, kv_heads, head_dim] of each layer.
        """
        self._reserve(at + count)
        for stored, added in zip(self._rows, rows, strict=True):
            stored[at : at + count] = added[:count]

    def padded(self, start: int, end: int) -> Array:
        """The rows from `start` to `end`, [2 * layers, bucket, kv_heads, head_dim].

        Rows from `end` on are padding, for the caller to mask.
        """
        bucket = max(-(-(end - start) // _BUCKET), 1) * _BUCKET
        self._reserve(start + bucket)
        return self._rows[:, start : start + bucket]

    def _reserve(self, rows: int) -> None:
        capacity = self._rows.shape[1]
        if rows > capacity:
            kinds, _, *rest = self._rows.shape
            grown = np.zeros((kinds, max(rows, 2 * capacity), *rest), np.float32)
            grown[:, :capacity] = self._rows
            self._rows = grown


class OpenVinoNetwork:
    """A checkpoint opened for a target; see `Network`."""

    def __init__(
        self, folder: Path, graph: Path, *, window: int | None = None, int8: bool = True
    ) -> None:
        """Check that the checkpoint fits the target, and compile the graphs.

        Args:
            folder: a checkpoint in z-lab's form.
            graph: the target's `openvino_model.xml`.
            window: tokens of context in attention at most; None: all.
            int8: quantize matrices to 8 bits per output channel; else float32.

        Raises:
            ModelError: the checkpoint cannot be used, or not with this target.
        """
        self.config = read_config(folder)
        target = read_target(graph)
        check_pair(folder, self.config, target)
        self._draft_vocab = draft_vocab = read_draft_vocab(folder, self.config)
        tensors, heads = read_tensors(folder, self.config)
        weights = {name: tensor.floats() for name, tensor in tensors.items()}
        builder = GraphBuilder(self.config, weights, int8=int8)
        self._chain = ChainHead.of(self.config, heads)
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if int8 else "0",
        }
        self._target: TargetWeights = target  # its weights are in the graph
        draft = core().compile_model(builder.draft_graph(target, draft_vocab), "CPU", options)
        prefill = core().compile_model(builder.context_graph(), "CPU", options)
        self._draft = draft.create_infer_request()
        self._prefill = prefill.create_infer_request()
        self._window = window
        self._rows = self.config.block_size
        self.taps = self.config.target_layer_ids
        size = self.config.tapped_size
        self.cost = measure_cost(self, lambda rows: np.zeros((rows, size), np.float32), window)

    def new_cache(self) -> ContextCache[HostKV]:
        """An empty cache for a sequence."""
        config = self.config
        return ContextCache(
            HostKV(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        )

    def tapped(self, taps: Mapping[str, Array], rows: int) -> Array:
        """Hidden states of a call's first `rows` rows, [rows, taps * d] float32."""
        return np.concatenate([taps[tap_name(tap)][:rows] for tap in self.taps], axis=1)

    def concat(self, parts: Sequence[Array]) -> Array:
        """Concatenate along tokens; see `Network`."""
        return np.concatenate([np.zeros((0, self.config.tapped_size), np.float32), *parts])

    def prefill(self, cache: ContextCache[HostKV], tapped: Array, start: int) -> None:
        """Append keys and values of `tapped` to the cache; see `Network`."""
        for at in range(0, len(tapped), PREFILL_CHUNK):
            part = tapped[at : at + PREFILL_CHUNK]
            positions = range(start + at, start + at + len(part))
            padding = padded_size(len(part)) - len(part)
            outputs = self._prefill.infer(
                {
                    "tapped": padded_rows(part, padding),
                    "positions": padded_rows(np.array(positions, np.float32), padding),
                },
                share_inputs=True,
                share_outputs=True,
            )
            self._append(cache, outputs, positions)

    def draft(
        self,
        cache: ContextCache[HostKV],
        token: int,
        position: int,
        tapped: Array,
        start: int,
        *,
        sampler: DraftSampler | None = None,
    ) -> tuple[list[int], list[float]]:
        """Append `tapped` and fill a block that begins with `token`; see `Network`."""
        rows = self._rows
        surplus = len(tapped) - rows
        if surplus > 0:
            self.prefill(cache, tapped[:surplus], start)
            tapped, start = tapped[surplus:], start + surplus
        new = len(tapped)
        padded = np.zeros((rows, self.config.tapped_size), np.float32)
        padded[:new] = tapped
        attended = len(cache) if self._window is None else max(self._window - new, 0)
        first = max(len(cache) - attended, 0)
        known = cache.positions[first:]
        past = cache.kv.padded(first, len(cache))
        # Padding rows have position 0; the mask excludes them.
        positions = np.zeros(2 * rows, np.float32)
        positions[:new] = range(start, start + new)
        positions[rows:] = range(position, position + rows)
        tokens = np.full(rows, self.config.mask_token_id, np.int64)
        tokens[0] = token
        inputs = {"tokens": tokens, "tapped": padded, "positions": positions}
        valid = np.zeros(past.shape[1] + 2 * rows, bool)
        valid[: len(known)] = True
        unseen = 0 if self._window is None else max(new - self._window, 0)
        valid[past.shape[1] + unseen : past.shape[1] + new] = True
        valid[past.shape[1] + rows :] = True
        inputs |= self._masks(valid, known, past.shape[1], positions)
        for layer in range(self.config.num_hidden_layers):
            inputs[f"keys.{layer}"] = past[2 * layer]
            inputs[f"values.{layer}"] = past[2 * layer + 1]
        outputs = self._draft.infer(inputs, share_inputs=True, share_outputs=True)
        self._append(cache, outputs, range(start, start + new))
        if self._chain is not None:
            best = Rows(*(outputs[name] for name in ("candidates", "scores", "hidden")))
            return self._chain.choose(best, token, position, sampler)
        if sampler is not None:
            return sampler.pick_rows(outputs["logits"], position + 1, self._draft_vocab)
        return outputs["drafts"].tolist(), outputs["chances"].tolist()

    def _masks(
        self, valid: Any, known: Sequence[int], past: int, positions: Array
    ) -> dict[str, Array]:
        """Attention masks [B, S + N + B] that exclude padding and what a window hides."""
        rows, windows = self._rows, self.config.windows
        full = np.where(valid, np.float32(0), np.float32(MASKED))
        masks = {}
        keys = np.zeros(len(valid), np.float32)
        keys[: len(known)] = known
        keys[past:] = positions
        ahead = keys[None] - positions[rows:, None]
        if None in windows:
            later = self.config.is_causal(None) & (ahead > 0)
            masks["mask.full"] = np.where(later, np.float32(MASKED), full[None])
        width = next((window for window in windows if window is not None), None)
        if width is not None:
            latest = 1 if self.config.is_causal(width) else width
            far = (-ahead >= width) | (ahead >= latest)
            masks["mask.window"] = np.where(far, np.float32(MASKED), full[None])
        return masks

    def _append(self, cache: ContextCache[HostKV], outputs: Any, positions: range) -> None:
        """Append the first rows of a graph's keys and values to the cache."""
        rows = [
            outputs[f"{kind}.{layer}"]
            for layer in range(self.config.num_hidden_layers)
            for kind in ("new_keys", "new_values")
        ]
        cache.kv.write(len(cache), rows, len(positions))
        cache.positions += positions
