"""Runs GGUF files by llama.cpp's family of libraries, exact by row classes.

A step runs its blocks one after another, each in the context of its sequence. The rows of a call
are those of one sequence, so the class of a call depends on its block alone, never on the batch.

Invariant: every call has a number of rows of its role's class (`engines/row_classes.py`): longer
blocks are divided, shorter ones padded. Padding comes after the rows, so no row sees it, and its
slots are dropped. No call gives logits of more rows than a decode call has.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter

import numpy as np

from paceline.decoding.types import Block, Logits
from paceline.engines.base import EngineSettings, KVSequence, StepResult
from paceline.engines.kv_blocks import BlockPool, PooledEngine
from paceline.engines.llamacpp.binding import Binding, ContextSettings, NativeContext, NativeModel
from paceline.engines.llamacpp.contexts import Contexts, whole
from paceline.engines.llamacpp.libraries import installed
from paceline.engines.llamacpp.sequence import LlamaSequence
from paceline.engines.llamacpp.weights import most_rows
from paceline.engines.row_classes import LONGEST, RowClasses, RowRange, keep, kept, measure
from paceline.errors import InvalidRequest
from paceline.storage.files import digest_of
from paceline.storage.gguf_file import read_gguf
from paceline.storage.system import cpu_cores, processor

SLOTS = 32
"""Slots of a KV block, which only counts."""

_MOST_ROWS = 256
"""Most rows of a call."""

_MOST_CONTEXTS = 4
"""Contexts that exist beside those of the running call."""

_MEASURE_SECONDS = 2.0
"""Time for the row classes of a model."""

_PADDING = 0
"""Token of padding rows; every vocabulary has it."""

_FORM = 2
"""Version of the measurement of row classes: of another one, nothing is taken."""

_ROWS = "one sequence in a call, keys and values in f16"
"""How rows are computed. Change this string with any change to a row's bits or a call's cost:
stored profiles are then measured again."""

UNMEASURED = RowClasses(RowRange(1, 16), RowRange(1, _MOST_ROWS))
"""Without padding: where `min_rows` is 1, and for models of which no class of rows is known."""


class LlamaCppEngine(PooledEngine[LlamaSequence]):
    """The engine; see the top of this file. `step` is not thread-safe."""

    name = "llamacpp"
    _table_type = LlamaSequence

    def __init__(
        self,
        path: Path,
        context_length: int,
        settings: EngineSettings | None = None,
        *,
        binding: Binding | None = None,
        classes: RowClasses | None = None,
    ) -> None:
        """Map a GGUF file, and measure its row classes.

        Args:
            path: the file.
            context_length: most slots of a sequence, as the model was trained.
            settings: see `EngineSettings`. With `min_rows` 1 calls are not padded.
            binding: the library; None: the one that is installed.
            classes: row classes; None: measured.

        Raises:
            MissingExtra: no library is installed, or not for this processor.
            ModelError: the library refuses the file.
            InvalidRequest: hidden states are needed, which the library does not return.
        """
        settings = settings or EngineSettings()
        if settings.taps:
            raise InvalidRequest(
                "the engine llamacpp returns no hidden states, which a drafter or embeddings need; "
                "use --engine openvino, or another drafter"
            )
        self.context_length = context_length
        self.taps: tuple[int, ...] = ()
        self._binding = binding or installed()
        self._threads = settings.threads or cpu_cores()
        self._model = NativeModel(self._binding, path)
        self.vocab_size = self._model.vocab_size
        slot_bytes = self._model.slot_bytes(self._threads)
        self._pool = BlockPool(-(-settings.slots(context_length, slot_bytes) // SLOTS), SLOTS)
        self._contexts = Contexts(
            self._model, context_length, _MOST_ROWS, self._threads, most=_MOST_CONTEXTS
        )
        if classes is None and settings.min_rows > 1:
            classes = self._row_classes(settings.measurements)
        self.classes = classes or UNMEASURED
        """Rows of a call by role."""
        self.min_rows = 1 if self.classes.single else self.classes.decode.least

    def open(self) -> LlamaSequence:
        """A new, empty sequence."""
        return LlamaSequence(self._pool, self.context_length, self._contexts)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences one after another; see `Engine.step`."""
        started = perf_counter()
        sequences = self._reserve(work)
        self._contexts.make_room(len(work))
        logits = [
            self._run(sequence, block) for sequence, (_, block) in zip(sequences, work, strict=True)
        ]
        return StepResult(logits, [{} for _ in work], perf_counter() - started)

    def close(self) -> None:
        """Free contexts and model; sequences are gone."""
        self._contexts.close()
        self._model.close()

    def describe(self) -> dict[str, str]:
        """Everything that costs and exactness depend on; recorded results hold these strings."""
        return {
            **self._depends(),
            "rows": f"{_ROWS}; {self.classes}",
            "min_rows": str(self.min_rows),
        }

    def _row_classes(self, folder: Path | None) -> RowClasses | None:
        """The model's row classes, measured if that was not done here before."""
        if folder is None:
            return self._measured()
        depends = [_FORM, *self._depends().values(), *self._model.identity]
        path = folder / f"{digest_of(depends)}.rows"
        classes = kept(path)
        if classes is None and (classes := self._measured()) is not None:
            keep(path, classes)
        return classes

    def _measured(self) -> RowClasses | None:
        path = self._model.path
        rows = most_rows(str(path), read_gguf(path).tensors)
        with closing(_Calls(self._model, self.context_length, self._threads)) as calls:
            return measure(calls, self._may_be_single, _MEASURE_SECONDS, most_rows=rows)

    def _may_be_single(self, keys: int) -> bool:
        heads = self._model.heads
        return heads is not None and self._binding.may_be_single(keys, heads, self._threads)

    def _depends(self) -> dict[str, str]:
        return {
            "engine": self.name,
            "library": f"{self._binding.name} {self._binding.version}",
            "processor": processor(),
            "threads": str(self._threads),
        }

    def _run(self, sequence: LlamaSequence, block: Block) -> Logits:
        """Run a block; returns the logits of its trailing `block.rows` rows."""
        count = len(block.tokens)
        role = self.classes.prefill if block.prefill else self.classes.decode
        single = count == 1 and not block.prefill and self.classes.single
        least = 1 if single and self._may_be_single(sequence.length) else role.least
        context = sequence.context(count + role.least)
        first = count - block.rows
        parts = list(role.split(count))
        logits = []
        for part in parts:
            rows = _call(
                context,
                block.tokens,
                part,
                first=first,
                least=least,
                most_outputs=self.classes.decode.most,
            )
            # The context's next call overwrites the logits of this one.
            logits.append(rows.copy() if len(parts) > 1 else rows)
        sequence.ran(block)
        return np.concatenate(logits) if len(parts) > 1 else logits[0]


def _call(
    context: NativeContext,
    tokens: Sequence[int],
    part: slice,
    *,
    first: int,
    least: int,
    most_outputs: int,
) -> Logits:
    """Run a part of a block in one call; logits of its rows from the block's row `first` on.

    Where these are more than `most_outputs`, the call is repeated for the others.
    """
    rows = tokens[part]
    padded = [*rows, *[_PADDING] * (least - len(rows))]
    start = context.length
    output = min(max(first - part.start, 0), len(rows))
    logits = context.decode(padded, slice(output, min(output + most_outputs, len(rows))))
    for further in range(output + most_outputs, len(rows), most_outputs):
        logits = logits.copy()
        context.truncate(start)
        outputs = slice(further, min(further + most_outputs, len(rows)))
        logits = np.concatenate([logits, context.decode(padded, outputs)])
    context.truncate(start + len(rows))
    return logits


class _Calls:
    """The calls of a measurement, with random tokens; see `row_classes.Prober`."""

    def __init__(self, model: NativeModel, context_length: int, threads: int) -> None:
        self.room = min(context_length, LONGEST)
        slots = whole(self.room + _MOST_ROWS)
        self._context = model.context(ContextSettings(slots, _MOST_ROWS, threads))
        self._tokens = np.random.default_rng(0).integers(0, model.vocab_size, slots).tolist()

    def prefill(self, length: int, rows: RowRange) -> None:
        """See `Prober.prefill`."""
        self._context.truncate(min(length, self._context.length))
        missing = self._tokens[self._context.length : length]
        for part in rows.split(len(missing)):
            _call(self._context, missing, part, first=length, least=rows.least, most_outputs=1)

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        """See `Prober.rows`."""
        self._context.truncate(length)
        return self._context.decode(self._tokens[length : length + count], slice(0, outputs)).copy()

    def close(self) -> None:
        """Free the context."""
        self._context.close()
