"""Runs a Core ML artifact: shards of layers in turn, then shards of the head.

Every call has the same number of rows, the artifact's own: a block is cut into calls of so many,
and the last is filled up with rows that are written nowhere. So a row is always computed by the
same program, which is what row invariance needs here; `engines/measure.py` measures whether it is
enough.

Models are loaded once, inputs are arrays that are made once, masks change only where they change,
and states are fresh for every sequence: a slot of an earlier one might hold a NaN, which a mask
would let through.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block, Taps, tap_name
from paceline.engines.base import EngineSettings, Sequence, StepResult
from paceline.engines.coreml.artifact import EMBEDDINGS, ROTARY, Artifact, read_artifact
from paceline.engines.coreml.inputs import Rows
from paceline.engines.coreml.packages import REHEARSED, on_a_mac, open_package
from paceline.engines.slots import BlockPool, BlockTable, reserve_all
from paceline.errors import InvalidRequest

Floats = npt.NDArray[np.float32]

_DEFAULT_SEQUENCES = 4
"""Sequences that can be open at once when the caller does not say: each has states of its own."""


class CoreMlEngine:
    """The engine; see the top of this file. One at a time may call `step`."""

    name = "coreml"

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings | None = None,
        *,
        units: str = "cpu-and-ne",
        rounding: str = "f16",
    ) -> None:
        """Validate an artifact and load its shards.

        Args:
            folder: the artifact.
            settings: see `EngineSettings`; `cache_tokens` is rounded up to whole sequences.
            units: compute units, on a Mac: see `packages.UNITS`.
            rounding: of the rehearsal, elsewhere: "f16" or "f32".

        Raises:
            ModelError: the artifact is not whole, or a shard cannot be loaded.
            InvalidRequest: a layer is to be tapped that the artifact does not give.
            MissingExtra: coremltools is not installed.
        """
        settings = settings or EngineSettings()
        started = perf_counter()
        self.artifact = artifact = read_artifact(folder)
        missing = sorted(set(settings.taps) - set(artifact.taps))
        if missing:
            raise InvalidRequest(
                f"{folder} gives no hidden states of layers {', '.join(map(str, missing))}; "
                "convert it again with --taps"
            )
        self.min_rows = settings.min_rows
        self.taps = settings.taps
        self.vocab_size = artifact.vocab_size
        self.context_length = artifact.slots
        self._units = units if on_a_mac() else REHEARSED
        self._rounding = rounding
        self._embeddings = np.load(folder / EMBEDDINGS, mmap_mode="r")
        self._rows = artifact.rows
        function = f"t{artifact.rows}" if artifact.functions else None
        opened = [
            open_package(folder / shard.path, function=function, units=units, rounding=rounding)
            for shard in (*artifact.layer_shards, *artifact.head_shards)
        ]
        self._layers = opened[: len(artifact.layer_shards)]
        self._heads = opened[len(artifact.layer_shards) :]
        cos, sin = np.load(folder / ROTARY)
        self._inputs = Rows(artifact.rows, cos, sin, ring=artifact.ring, lags=artifact.lags)
        self._stream = np.zeros((1, artifact.stream_size, artifact.rows, 1), np.float32)
        tokens = settings.cache_tokens or _DEFAULT_SEQUENCES * artifact.slots
        # A sequence's slots are its states, all of them at once: a cache block is a whole context.
        sequences = -(-tokens // artifact.slots)
        self._pool = BlockPool(sequences, artifact.slots)
        self._states: list[list[Any]] = [[] for _ in range(sequences)]
        self._logits = np.zeros((0, artifact.vocab_size), np.float32)
        self.seconds = {"load": perf_counter() - started, "layers": 0.0, "head": 0.0, "host": 0.0}
        """Where the time went, since the engine was opened."""

    @property
    def free_slots(self) -> int:
        """Slots that no sequence holds."""
        return self._pool.free * self._pool.block_size

    def open(self) -> BlockTable:
        """A new, empty sequence."""
        return Slots(self._pool, self.artifact)

    def step(self, work: Ordered[tuple[Sequence, Block]]) -> StepResult:
        """Run blocks of different sequences, one after the other; see `Engine.step`."""
        tables = [_table(sequence) for sequence, _ in work]
        reserve_all(
            [(table, len(block.tokens)) for table, (_, block) in zip(tables, work, strict=True)]
        )
        before = dict(self.seconds)
        started = perf_counter()
        wanted = sum(block.rows for _, block in work)
        if wanted > len(self._logits):
            self._logits = np.zeros((wanted, self.vocab_size), np.float32)
        logits, taps = [], []
        at = 0
        for table, (_, block) in zip(tables, work, strict=True):
            taken = self._logits[at : at + block.rows]
            taps.append(self._run(table, block, taken))
            logits.append(taken)
            at += block.rows
        in_models = sum(self.seconds[name] - before[name] for name in ("layers", "head"))
        self.seconds["host"] += perf_counter() - started - in_models
        return StepResult(logits, taps, in_models)

    def describe(self) -> dict[str, str]:
        """What costs and exactness depend on."""
        import platform

        return {
            "engine": self.name,
            "units": self._units,
            "rounding": "" if on_a_mac() else self._rounding,
            "system": platform.platform(),
            "rows": str(self._rows),
            "min_rows": str(self.min_rows),
            "taps": ",".join(map(str, self.taps)),
        }

    def _run(self, table: BlockTable, block: Block, logits: Floats) -> Taps:
        """One sequence's block, in calls of as many rows as the artifact has."""
        states = self._states_of(table)
        count = len(block.tokens)
        tapped: dict[str, list[Floats]] = {tap_name(tap): [] for tap in self.taps}
        for at in range(0, count, self._rows):
            tokens = block.tokens[at : at + self._rows]
            stream, taps = self._call(states, tokens, table.length + at)
            for name, rows in taps.items():
                tapped[name].append(rows)
            first = max(count - block.rows - at, 0)
            if first < len(tokens):
                begin = at + first - (count - block.rows)
                self._choose(stream, first, logits[begin : begin + len(tokens) - first])
        return {name: np.concatenate(rows) for name, rows in tapped.items()}

    def _call(
        self, states: Ordered[Any], tokens: Ordered[int], start: int
    ) -> tuple[Floats, Mapping[str, Floats]]:
        """The stream after the last layer, [1, stream_size, rows, 1], and what was tapped."""
        size, count = self.artifact.hidden_size, len(tokens)
        self._stream[0, :size, :count, 0] = self._embeddings[list(tokens)].T
        self._stream[0, :size, count:, 0] = 0
        inputs = self._inputs.at(start, count)
        stream = self._stream
        tapped = {}
        for shard, package, state in zip(
            self.artifact.layer_shards, self._layers, states, strict=True
        ):
            started = perf_counter()
            found = package.predict({"hidden": stream, **inputs}, state)
            self.seconds["layers"] += perf_counter() - started
            stream = found["out_hidden"]
            for tap in set(shard.taps) & set(self.taps):
                tapped[tap_name(tap)] = found[f"tap_{tap}"][0, :, :count, 0].T
        return stream, tapped

    def _choose(self, stream: Floats, first: int, logits: Floats) -> None:
        """The head, for rows from `first` on, into `logits` [rows, vocab]."""
        for shard, package in zip(self.artifact.head_shards, self._heads, strict=True):
            started = perf_counter()
            found = package.predict({"hidden": stream})["logits"]
            self.seconds["head"] += perf_counter() - started
            logits[:, shard.start : shard.end] = found[0, :, first : first + len(logits), 0].T

    def _states_of(self, table: BlockTable) -> list[Any]:
        """The states of a sequence, one for each shard of layers: new where it is empty."""
        (number,) = table.blocks(0) or table.blocks(1)
        if table.length == 0:
            self._states[number] = [package.make_state() for package in self._layers]
        return self._states[number]


class Slots(BlockTable):
    """A sequence's slots, and how far its windows can go back."""

    def __init__(self, pool: BlockPool, artifact: Artifact) -> None:
        super().__init__(pool, artifact.slots)
        self._artifact = artifact
        self._back = artifact.ring - artifact.lags if artifact.lags else artifact.slots
        self._written = 0

    def reserve(self, rows: int) -> None:
        """Make room for a block of `rows` rows; see `BlockTable`."""
        super().reserve(rows)
        self._written = max(self._written, self.length + rows)

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block.

        Raises:
            ValueError: they are more than the block had, or so few that what windows look back to
                has been written over.
        """
        if self._written - self.length - rows > self._back:
            raise ValueError(f"commit({rows}): windows can go back {self._back} rows")
        super().commit(rows)

    def rewind(self, length: int) -> None:
        """Forget all slots from `length` on, and all there are where windows cannot go back."""
        far = 0 <= length <= self.length and self._written - length > self._back
        super().rewind(0 if far else length)
        if not self.length:
            self._written = 0

    def fork(self, length: int) -> BlockTable:
        """An empty sequence: states are not shared."""
        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self.length} slots")
        return type(self)(self._pool, self._artifact)


def _table(sequence: Sequence) -> BlockTable:
    if not isinstance(sequence, Slots):
        raise TypeError(f"a {type(sequence).__name__} is not a sequence of this engine")
    return sequence
