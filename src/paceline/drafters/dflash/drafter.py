"""Running DFlash: the opened network that all requests share, and the drafter of one request."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from paceline.decoding.types import Drafter, Proposal, Verified, tap_name
from paceline.drafters.dflash.checkpoint import (
    Array,
    read_config,
    read_draft_vocab,
    read_weights,
)
from paceline.drafters.dflash.graph import HIDDEN, Builder
from paceline.drafters.dflash.target import Target, check_pair, read_target

_STEP = 256
"""Context is attended to in steps of so many rows: another size takes time to prepare."""

_CHUNK = 512
"""Most rows of a prompt in one call."""

_TIMED = 5


class Context:
    """What is known of one sequence: keys and values of its tokens, layer by layer.

    In decoding it is only extended and cut, never copied. A token's keys are turned to its
    position, so gaps do no harm: what was not seen is not there.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self._rows: Array = np.zeros((2 * layers, 0, kv_heads, head_dim), np.float32)
        self.positions: list[int] = []
        """The position of each row, ascending."""
        self.waiting: list[Array] = []
        """Features of the tokens behind those, as they came; they have no rows yet."""
        self.waits_from = 0
        """The position of the first that waits; there are no gaps between them."""

    def __len__(self) -> int:
        return len(self.positions)

    def copy(self, position: int) -> "Context":
        """The same for a sequence that shares the tokens before this position."""
        other = Context(0, 0, 0)
        other._rows = self._rows.copy()
        other.positions, other.waiting = list(self.positions), list(self.waiting)
        other.waits_from = self.waits_from
        other.cut(position)
        return other

    def extend(self, rows: Sequence[Array], positions: Sequence[int]) -> None:
        """Add rows: for each layer keys [n, kv_heads, head_dim], then values."""
        start, end = len(self), len(self) + len(positions)
        self._make_room(end)
        for kept, new in zip(self._rows, rows, strict=True):
            kept[start:end] = new[: len(positions)]
        self.positions += positions

    def cut(self, position: int) -> None:
        """Forget the rows of this position and later ones."""
        while self.positions and self.positions[-1] >= position:
            self.positions.pop()
        kept = max(position - self.waits_from, 0)
        self.waiting = [np.concatenate(self.waiting)[:kept]] if self.waiting and kept else []

    def last(self, most: int | None) -> tuple[Array, Sequence[int]]:
        """The last rows, at most `most` of them, and the position of each.

        [2 * layers, size, kv_heads, head_dim], where a size is usual and what is beyond the rows
        is to be masked.
        """
        wanted = len(self) if most is None else min(len(self), most)
        start = len(self) - wanted
        size = max(-(-wanted // _STEP), 1) * _STEP
        self._make_room(start + size)
        return self._rows[:, start : start + size], self.positions[start:]

    def _make_room(self, rows: int) -> None:
        here = self._rows.shape[1]
        if rows > here:
            kinds, _, *rest = self._rows.shape
            grown = np.zeros((kinds, max(rows, 2 * here), *rest), np.float32)
            grown[:, :here] = self._rows
            self._rows = grown


class DFlash:
    """A checkpoint opened for a target. Not for several threads at once."""

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
        self.seconds = self._measure()
        """What a block takes, at a short context."""

    def context(self) -> Context:
        """Room for a new sequence's keys and values."""
        config = self.config
        return Context(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def read(self, context: Context, features: Array, start: int) -> None:
        """Add tokens to the context: their features [n, taps * d], at positions from `start`."""
        for at in range(0, len(features), _CHUNK):
            part = features[at : at + _CHUNK]
            positions = range(start + at, start + at + len(part))
            found = self._reading.infer(
                {"features": part, "positions": np.array(positions, np.float32)},
                share_inputs=True,
                share_outputs=True,
            )
            context.extend(self._new_rows(found), positions)

    def draft(
        self, context: Context, token: int, position: int, features: Array, start: int
    ) -> tuple[list[int], list[float]]:
        """Fill a block that begins with `token` at `position`; adds what is new to the context.

        Args:
            context: of the tokens before.
            token: the last token, whose features are not known yet.
            position: where it stands.
            features: [n, taps * d] of the newest tokens before it, not yet in the context.
            start: the position of the first of them.

        Returns:
            block_size - 1 tokens, and for each the chance that the network gives it.
        """
        rows = self._rows
        surplus = len(features) - rows
        if surplus > 0:
            self.read(context, features[:surplus], start)
            features, start = features[surplus:], start + surplus
        new = len(features)
        padded = np.zeros((rows, self.config.feature_size), np.float32)
        padded[:new] = features
        most = None if self._window is None else max(self._window - new, 0)
        past, known = context.last(most)
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
        context.extend(self._new_rows(found), range(start, start + new))
        return drafts, chances

    def features(self, taps: Mapping[str, Array], rows: int) -> Array:
        """The features of a block's first rows, [rows, taps * d], from what an engine tapped."""
        return np.concatenate([taps[tap_name(tap)][:rows] for tap in self.taps], axis=1)

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

    def _new_rows(self, found: Any) -> list[Array]:
        return [
            found[f"{kind}.{at}"]
            for at in range(self.config.num_hidden_layers)
            for kind in ("new_keys", "new_values")
        ]

    def _measure(self) -> float:
        features = np.zeros((1, self.config.feature_size), np.float32)
        times = []
        for _ in range(_TIMED + 1):  # the first also prepares
            context = self.context()
            started = perf_counter()
            self.draft(context, 0, 1, features, 0)
            times.append(perf_counter() - started)
        return median(times[1:])


class DFlashDrafter(Drafter):
    """Drafts a block in one pass, for one request."""

    name = "dflash"

    def __init__(self, network: DFlash, context: Context) -> None:
        """Draft with `network`; `context` holds what is known of the sequence already."""
        self._network = network
        self._context = context
        self._asked_at = -1
        self._last = Proposal((), self.name)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The block after the last token; nothing before the target was seen at work."""
        known = self._context
        if not (known.waiting or len(known)):
            return Proposal((), self.name)
        if self._asked_at != len(context):
            nothing = np.zeros((0, self._network.config.feature_size), np.float32)
            features = np.concatenate([nothing, *known.waiting])
            known.waiting = []
            tokens, chances = self._network.draft(
                known, context[-1], len(context) - 1, features, known.waits_from
            )
            self._last = Proposal(tokens, self.name, 0, chances)
            self._asked_at = len(context)
        return self._last.cut(limit)

    def observe(self, verified: Verified) -> None:
        """Keep the features of the rows that are part of the sequence now."""
        if not verified.taps or not verified.kept:
            return
        known = self._context
        count = sum(map(len, known.waiting))
        # A long prompt is read as it comes; and so is what stands before a gap.
        if count > _CHUNK or (count and known.waits_from + count != verified.start):
            self._network.read(known, np.concatenate(known.waiting), known.waits_from)
            known.waiting = []
        if not known.waiting:
            known.waits_from = verified.start
        known.waiting.append(self._network.features(verified.taps, verified.kept))

    def cost(self, limit: int) -> float:
        """What a block takes, however little of it is wanted."""
        return self._network.seconds
