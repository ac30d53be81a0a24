"""Runs a Core ML artifact: shards of layers in turn, then shards of the head.

Every call has the same number of rows, the artifact's own: a block is cut into calls of so many,
and the last is filled up with rows that are written nowhere. So a row is always computed by the
same program, which is what row invariance needs here; `engines/profile.py` measures whether it is
enough. With `min_rows` 1 a call has the rows that its block needs, where the packages allow it.

Models are loaded once, inputs are arrays that are made once, masks change only where they change,
and states are fresh for every sequence: a slot of an earlier one might hold a NaN, which a mask
would let through.
"""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Best, Block, Logits, tap_name
from paceline.engines.base import EngineSettings, KVSequence, StepResult
from paceline.engines.coreml.artifact import (
    CAUSAL_LM,
    ROTARY,
    Artifact,
    read_artifact,
)
from paceline.engines.coreml.call import Call, Width
from paceline.engines.coreml.flops import Work, work_of
from paceline.engines.coreml.packages import (
    DEFAULT_UNITS,
    REHEARSED,
    Packages,
    on_a_mac,
    open_packages,
)
from paceline.engines.kv_blocks import BlockPool, BlockTable, reserve_all
from paceline.errors import InvalidRequest, ModelError
from paceline.storage.coreml import EMBEDDINGS

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
        units: str = DEFAULT_UNITS,
        rounding: str = "f16",
    ) -> None:
        """Validate an artifact and load its shards.

        Args:
            folder: the artifact.
            settings: see `EngineSettings`; `cache_tokens` is rounded up to whole sequences.
            units: compute units, on a Mac: see `packages.UNITS`.
            rounding: of the rehearsal, elsewhere: "f16" or "f32".

        Raises:
            ModelError: the artifact is not whole, or classifies tokens, or a shard cannot be
                loaded.
            InvalidRequest: a layer is to be tapped that the artifact does not give.
            MissingExtra: coremltools is not installed.
        """
        settings = settings or EngineSettings()
        started = perf_counter()
        self.artifact = artifact = read_artifact(folder)
        if artifact.task != CAUSAL_LM:
            raise ModelError(
                f"{folder} is for {artifact.task} and cannot continue a text; open it with "
                "paceline.engines.coreml.classifier.TextClassifier"
            )
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
        widths = range(1, artifact.rows + 1) if not artifact.functions else artifact.functions
        chosen = [artifact.rows] if settings.min_rows > 1 else sorted(widths)
        tables = np.load(folder / ROTARY)
        opened: dict[str | None, Packages] = {}
        self._widths = []
        for width in chosen:
            function = f"t{width}" if artifact.functions else None
            if function not in opened:
                opened[function] = open_packages(artifact, function, units, rounding)
            self._widths.append(Width(artifact, opened[function], width, tables))
        tokens = settings.cache_tokens or _DEFAULT_SEQUENCES * artifact.slots
        # A sequence's slots are its states, all of them at once: a cache block is a whole context.
        sequences = -(-tokens // artifact.slots)
        self._pool = BlockPool(sequences, artifact.slots)
        self._states: list[list[Any]] = [[] for _ in range(sequences)]
        self._logits = np.zeros((0, artifact.vocab_size), np.float32)
        self._parts: dict[str, float] = {}
        self.load_seconds = perf_counter() - started
        """What opening took: reading, checking and loading."""

    @property
    def free_slots(self) -> int:
        """Slots that no sequence holds."""
        return self._pool.free * self._pool.block_size

    @property
    def block_size(self) -> int:
        """Slots come in blocks of so many."""
        return self._pool.block_size

    def freed_by(self, sequences: Sequence[KVSequence]) -> int:
        """Slots that closing all of `sequences` would free; see `Engine.freed_by`."""
        return self._pool.freed_by(_table(each) for each in sequences)

    def open(self) -> BlockTable:
        """A new, empty sequence."""
        return Slots(self._pool, self.artifact)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences, one after the other; see `Engine.step`.

        `parts` of the result are `layers` and `head`, `first calls` of a number of rows, in which
        Core ML prepares itself for it, and `inputs`, which is all that is not a call.
        """
        tables = [_table(sequence) for sequence, _ in work]
        reserve_all(
            [(table, len(block.tokens)) for table, (_, block) in zip(tables, work, strict=True)]
        )
        started = perf_counter()
        self._parts = {}
        wanted = sum(block.rows for _, block in work if not block.best)
        if wanted > len(self._logits):
            self._logits = np.zeros((wanted, self.vocab_size), np.float32)
        logits, best, taps = [], [], []
        at = 0
        for table, (_, block) in zip(tables, work, strict=True):
            rows = 0 if block.best else block.rows
            chosen = Best(np.zeros(block.rows, np.int64), np.zeros(block.rows, np.float32))
            logits.append(self._logits[at : at + rows])
            best.append(chosen if block.best else None)
            taps.append(self._run(table, block, logits[-1], best[-1]))
            at += rows
        in_models = sum(self._parts.values())
        self._parts["inputs"] = perf_counter() - started - in_models
        return StepResult(logits, taps, in_models, best, self._parts)

    def describe(self) -> dict[str, str]:
        """What costs and exactness depend on."""
        import platform

        return {
            "engine": self.name,
            "units": self._units,
            "rounding": "" if on_a_mac() else self._rounding,
            "system": platform.platform(),
            "rows": ",".join(str(width.rows) for width in self._widths),
            "min_rows": str(self.min_rows),
            "taps": ",".join(map(str, self.taps)),
        }

    def work(self) -> Work:
        """What calls of one row and of the most rows multiply and read; see `work.py`.

        Raises:
            ModelError: a shard cannot be rehearsed.
            InvalidRequest: the artifact has not slots for so many rows.
        """
        return work_of(self.artifact)

    def _run(
        self, table: BlockTable, block: Block, logits: Logits, best: Best | None
    ) -> dict[str, Floats]:
        """One sequence's block, in as few calls as there can be; its tapped hidden states."""
        states = self._states_of(table)
        count, most = len(block.tokens), self._widths[-1].rows
        tapped: dict[str, list[Floats]] = {tap_name(tap): [] for tap in self.taps}
        for at in range(0, count, most):
            tokens = block.tokens[at : at + most]
            width = next(width for width in self._widths if width.rows >= len(tokens))
            embeddings = self._embeddings[list(tokens)]
            call = Call(width, self._parts, states)
            stream, taps = call.layers(embeddings, table.length + at, self.taps)
            for name, rows in taps.items():
                tapped[name].append(rows)
            first = max(count - block.rows - at, 0)
            if first >= len(tokens):
                continue
            begin = at + first - (count - block.rows)
            asked = slice(begin, begin + len(tokens) - first)
            call.head(
                stream,
                first,
                logits[asked],
                None if best is None else Best(best.tokens[asked], best.scores[asked]),
            )
        return {name: np.concatenate(rows) for name, rows in tapped.items()}

    def _states_of(self, table: BlockTable) -> list[Any]:
        """The states of a sequence, one for each shard of layers: new where it is empty."""
        (number,) = table.blocks(0) or table.blocks(1)
        if table.length == 0:
            self._states[number] = [one.make_state() for one in self._widths[0].packages.layers]
        return self._states[number]


class Slots(BlockTable):
    """A sequence's slots, and how far its windows can go back."""

    def __init__(self, pool: BlockPool, artifact: Artifact) -> None:
        super().__init__(pool, artifact.slots)
        self._artifact = artifact
        self._back = artifact.conv_slots - artifact.lags if artifact.lags else artifact.slots
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

    def fork(self, length: int) -> Self:
        """An empty sequence: states are not shared."""
        if length < 0:
            raise ValueError(f"fork({length}) of a sequence of {self.length} slots")
        return type(self)(self._pool, self._artifact)


def _table(sequence: KVSequence) -> BlockTable:
    if not isinstance(sequence, Slots):
        raise TypeError(f"a {type(sequence).__name__} is not a sequence of this engine")
    return sequence
