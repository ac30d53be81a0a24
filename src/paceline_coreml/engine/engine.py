"""Runs a Core ML artifact: its layer shards in order, then its head shards.

Prefill passes have the artifact's `rows`, and decode passes its `decode_rows`. Blocks are split
into such passes, and the last one is padded. So the same program computes every row of a role; the
core measures whether rows are then bit-identical. With `min_rows` 1, passes use the smallest bucket
that fits the block.

Models and input arrays are allocated once, and masks change in place. Every sequence gets new
states: a NaN in a slot of an earlier sequence would pass through the mask.
"""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Best, Block, Logits, tap_name
from paceline.engines.base import EngineSettings, KVSequence, StepResult
from paceline.engines.kv_blocks import BlockPool, BlockTable, PooledEngine
from paceline.errors import InvalidRequest, ModelError
from paceline.storage.coreml import EMBEDDINGS
from paceline_coreml.engine.artifact import CAUSAL_LM, ROTARY, Artifact, read_artifact
from paceline_coreml.engine.call import Bucket
from paceline_coreml.engine.inputs import CallInputs
from paceline_coreml.engine.packages import (
    DEFAULT_UNITS,
    REHEARSED,
    PackageOpener,
    Packages,
    on_a_mac,
)

Floats = npt.NDArray[np.float32]

_DEFAULT_SEQUENCES = 4
"""Default number of open sequences; each has its own states."""


class CoreMlSequence(BlockTable):
    """A sequence whose convolution states can be rolled back by a limited number of rows.

    Decoded tokens' KV is also shareable if decode passes have the same rows as prefill passes.
    """

    def __init__(self, pool: BlockPool, artifact: Artifact) -> None:
        super().__init__(pool, artifact.slots)
        self._artifact = artifact
        self._max_rollback = artifact.ring - artifact.lags if artifact.lags else artifact.slots
        self._written = 0
        self.states: list[Any] = []
        """One per layer shard; new ones replace them when the sequence is empty."""

    def ran(self, block: Block) -> None:
        one_role = self._artifact.decode_rows == self._artifact.rows
        super().ran(block._replace(prefill=block.prefill or one_role))

    def reserve(self, rows: int) -> None:
        super().reserve(rows)
        self._written = max(self._written, self.length + rows)

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block.

        Raises ValueError if the block had fewer rows, or if too many are dropped: convolution
        states of the kept rows are then overwritten.
        """
        if self._written - self.length - rows > self._max_rollback:
            raise ValueError(f"commit({rows}) rolls back more than {self._max_rollback} rows")
        super().commit(rows)

    def rewind(self, length: int) -> None:
        far = 0 <= length <= self.length and self._written - length > self._max_rollback
        super().rewind(0 if far else length)
        if not self.length:
            self.states, self._written = [], 0

    def fork_length(self, length: int) -> int:
        del length
        return 0

    def _new(self) -> Self:
        return type(self)(self._pool, self._artifact)

    def _copy(self, fork: Self, shared: int) -> None:
        raise NotImplementedError("states cannot be copied; see `fork_length`")


class CoreMlEngine(PooledEngine[CoreMlSequence]):
    """An engine for Core ML; see the top of this file. `step` is not thread-safe."""

    name = "coreml"
    shares_calls = False
    _table_type = CoreMlSequence

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings | None = None,
        *,
        units: str = DEFAULT_UNITS,
        rounding: str = "f16",
    ) -> None:
        """Validate an artifact and load its shards; see `PackageOpener`.

        The setting `cache_tokens` is rounded up to whole sequences.

        Raises:
            ModelError: the artifact is corrupt or a token classifier, or a shard cannot be loaded.
            InvalidRequest: the artifact has no tap for a layer of `settings.taps`.
            MissingExtra: coremltools is not installed.
        """
        settings = settings or EngineSettings()
        started = perf_counter()
        self.artifact = artifact = read_artifact(folder)
        if artifact.task != CAUSAL_LM:
            raise ModelError(
                f"{folder} is for {artifact.task} and cannot generate text; `paceline classify` "
                "runs classifiers, and `--drafter dflash:FOLDER` drafters"
            )
        missing = sorted(set(settings.taps) - set(artifact.taps))
        if missing:
            raise InvalidRequest(
                f"{folder} has no hidden states of layers {', '.join(map(str, missing))}; "
                "convert it again with --taps"
            )
        self.min_rows = settings.min_rows
        self.single_row_fault = ""
        """Why passes cannot have one row; empty if they can."""
        if 1 not in artifact.widths:
            self.single_row_fault = (
                f"{folder} has no function for 1 row: all its passes have {artifact.decode_rows}; "
                f"remove --min-rows 1, or convert it again with --functions 1,{artifact.rows}"
            )
        self.taps = settings.taps
        self.vocab_size = artifact.vocab_size
        self.context_length = artifact.slots
        self._units = units if on_a_mac() else REHEARSED
        self._rounding = rounding
        self._embeddings = np.load(folder / EMBEDDINGS, mmap_mode="r")
        opener = PackageOpener(
            artifact, units=units, rounding=rounding, on_message=settings.progress.note
        )
        self._decode, self._prompt = _buckets(artifact, opener, exact=settings.min_rows > 1)
        tables = np.load(folder / ROTARY)
        self._inputs = {
            bucket.rows: CallInputs(
                bucket.rows, *tables, conv_slots=artifact.ring, lags=artifact.lags
            )
            for bucket in (*self._decode, *self._prompt)
        }
        tokens = settings.cache_tokens or _DEFAULT_SEQUENCES * artifact.slots
        # A sequence's slots are its states, allocated all at once: a KV block is a whole context.
        sequences = -(-tokens // artifact.slots)
        self._pool = BlockPool(sequences, artifact.slots)
        self._logits = np.zeros((0, artifact.vocab_size), np.float32)
        self._parts: dict[str, float] = {}
        self.load_seconds = perf_counter() - started
        """Seconds to read, check and load the artifact."""

    def open(self) -> CoreMlSequence:
        return CoreMlSequence(self._pool, self.artifact)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences, one after the other; see `Engine.step`.

        The result's `parts` are seconds: `layers`, `head`, `first calls` of a bucket, when Core ML
        prepares it, and `inputs`, all other time.
        """
        tables = self._reserve(work)
        started = perf_counter()
        self._parts = {}
        logit_rows = sum(block.rows for _, block in work if not block.best)
        if logit_rows > len(self._logits):
            self._logits = np.zeros((logit_rows, self.vocab_size), np.float32)
        logits, best, taps = [], [], []
        at = 0
        for table, (_, block) in zip(tables, work, strict=True):
            rows = 0 if block.best else block.rows
            chosen = Best(np.zeros(block.rows, np.int64), np.zeros(block.rows, np.float32))
            logits.append(self._logits[at : at + rows])
            best.append(chosen if block.best else None)
            taps.append(self._run(table, block, logits[-1], best[-1]))
            table.ran(block)
            at += rows
        in_models = sum(self._parts.values())
        self._parts["inputs"] = perf_counter() - started - in_models
        return StepResult(logits, taps, in_models, best, self._parts)

    def describe(self) -> dict[str, str]:
        import platform

        return {
            "engine": self.name,
            "units": self._units,
            "rounding": "" if on_a_mac() else self._rounding,
            "system": platform.platform(),
            "rows": ",".join(str(bucket.rows) for bucket in self._decode),
            "prompt_rows": ",".join(str(bucket.rows) for bucket in self._prompt),
            "min_rows": str(self.min_rows),
            "taps": ",".join(map(str, self.taps)),
        }

    @property
    def remark(self) -> str:
        if on_a_mac():
            return ""
        return "emulated: times are numpy's on this machine, and not those of a Neural Engine"

    def _run(
        self, table: CoreMlSequence, block: Block, logits: Logits, best: Best | None
    ) -> dict[str, Floats]:
        """Run one sequence's block in as few passes as possible; return tap name -> [T, d]."""
        states = self._states_of(table)
        buckets = self._prompt if block.prefill else self._decode
        count, max_rows = len(block.tokens), buckets[-1].rows
        tapped: dict[str, list[Floats]] = {tap_name(tap): [] for tap in self.taps}
        for at in range(0, count, max_rows):
            tokens = block.tokens[at : at + max_rows]
            bucket = next(bucket for bucket in buckets if bucket.rows >= len(tokens))
            embeddings = self._embeddings[list(tokens)]
            inputs = self._inputs[bucket.rows].for_rows(table.length + at, len(tokens))
            stream, taps = bucket.layers(states, embeddings, inputs, self.taps, self._parts)
            for name, rows in taps.items():
                tapped[name].append(rows)
            first = max(count - block.rows - at, 0)
            if first >= len(tokens):
                continue
            begin = at + first - (count - block.rows)
            logit_rows = slice(begin, begin + len(tokens) - first)
            picks = None
            if best is not None:
                picks = Best(best.tokens[logit_rows], best.scores[logit_rows])
            bucket.head(stream, first, logits[logit_rows], picks, self._parts)
        return {name: np.concatenate(rows) for name, rows in tapped.items()}

    def _states_of(self, table: CoreMlSequence) -> list[Any]:
        """Return a sequence's states, one per layer shard; they are new if it is empty."""
        if table.length == 0:
            # All functions of a package can use its states, one at a time.
            table.states = [package.make_state() for package in self._decode[0].packages.layers]
        return table.states


def _buckets(
    artifact: Artifact, opener: PackageOpener, *, exact: bool
) -> tuple[list[Bucket], list[Bucket]]:
    """Load an artifact's shards, once per function; return the buckets of decode and prompts.

    If `exact`, each role has one row count.
    """
    max_rows = artifact.decode_rows
    decode = [max_rows] if exact else [rows for rows in artifact.widths if rows <= max_rows]
    prompt = [artifact.rows] if exact else artifact.widths
    widths = sorted({*decode, *prompt})
    opened: dict[str | None, Packages] = {}
    for function in map(artifact.function, widths):
        if function not in opened:
            opened[function] = opener.open_all(function)
    buckets = {rows: Bucket(artifact, opened[artifact.function(rows)], rows) for rows in widths}
    return [buckets[rows] for rows in decode], [buckets[rows] for rows in prompt]
