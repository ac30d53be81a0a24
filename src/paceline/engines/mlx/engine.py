"""Runs models of mlx-lm, on an Apple GPU or with MLX's CPU build.

A step builds the graphs of all its blocks and evaluates them at once: it waits for the device one
time. Drafts that are still being computed go into those graphs as they are, and are waited for with
them. Sequences are run one behind the other. mlx-lm's batched caches would put them into one
product, whose number of rows, and so its kernel, would then depend on who else is in the call; and
they are padded on the left to the longest, which moves the order in which a row's sums are taken.

A call has as many rows as `rows.py` found to make no difference. Rows of a prompt that nobody reads
are not part of that: they are read in calls of up to `reads` rows, as fast as the device can, and
the head is not computed for them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

from paceline.decoding.types import Block
from paceline.engines.base import EngineSettings, KVSequence, StepResult
from paceline.engines.kv_blocks import BlockPool, reserve_all
from paceline.engines.mlx.caches import SLOTS, slot_bytes
from paceline.engines.mlx.hooks import Array
from paceline.engines.mlx.kv_sequence import MlxSequence
from paceline.engines.mlx.model import LoadedModel, device, in_a_line, load
from paceline.engines.mlx.rows import ANY, RowRange, choose
from paceline.engines.mlx.step import Asked, Started, TapArrays, on_device
from paceline.errors import InvalidRequest, ModelError

READS = 512
"""Rows of a call that reads a prompt."""

_PROMPTS = "shared without their answers"
"""How sequences are computed and shared. Whoever changes the bits of a row or what a call costs
changes these words, too: measurements kept on a machine are then made again."""


class MlxEngine:
    """The engine; see the top of this file. One at a time may call `step`."""

    name = "mlx"

    def __init__(
        self,
        folder: Path,
        context_length: int,
        settings: EngineSettings | None = None,
        *,
        rows: RowRange | None = None,
        reads: int = READS,
    ) -> None:
        """Load a model and find out which numbers of rows agree.

        Args:
            folder: a checkpoint: config.json and safetensors, quantized by mlx-lm or not.
            context_length: the most slots a sequence may have, as the model was trained.
            settings: see `EngineSettings`. With `min_rows` 1 a call has the rows of its block.
            rows: the numbers of rows that calls may have; None: what is found to agree.
            reads: rows of a call that reads a prompt.

        Raises:
            MissingExtra: mlx-lm is not installed.
            ModelError: mlx-lm cannot load or run it.
            InvalidRequest: a layer is to be tapped that there is not, or threads were set.
        """
        settings = settings or EngineSettings()
        if settings.threads is not None:
            raise InvalidRequest(
                "the engine mlx takes no number of threads, for MLX has none to set; leave it away"
            )
        self.context_length = context_length
        self.min_rows = settings.min_rows
        self.taps = settings.taps
        self.model = LoadedModel(load(folder), settings.taps)
        """The model, for those who share its embeddings and head, or call it themselves."""
        self._reads = reads
        try:
            self.vocab_size, bytes_per_slot = self._call_once()
            if rows is None and settings.min_rows > 1:
                rows = choose(self.model, context_length)
                if rows is None:
                    self.min_rows = 1  # which says that nothing is promised
        except Exception as error:  # of any kind: a config that fits no weights shows here
            raise ModelError(f"{folder} cannot be run by mlx-lm: {in_a_line(error)}") from error
        self.rows = rows or ANY
        """The numbers of rows that calls have."""
        tokens = settings.slots(context_length, bytes_per_slot)
        self._pool = BlockPool(-(-tokens // SLOTS), SLOTS)

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
        return self._pool.freed_by(_own(each) for each in sequences)

    def open(self) -> MlxSequence:
        """A new, empty sequence."""
        return MlxSequence(self._pool, self.context_length, self.model)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences, and wait for all of them once; see `Engine.step`.

        `parts` of the result are `graph`, in which the host says what is to be computed, and
        `device`, in which it waits.
        """
        return self.finish(self.start(work))

    def start(self, work: Sequence[tuple[KVSequence, Block]]) -> Started:
        """The first half of `step`: build the graph. Whoever adds to it does so before `finish`.

        Raises:
            CacheFull: there are no slots for the blocks. Nothing was run.
            ModelError: MLX could not read a prompt: there is no memory for it, most likely.
        """
        started = perf_counter()
        sequences = [_own(sequence) for sequence, _ in work]
        blocks = [block for _, block in work]
        reserve_all(
            [(one, len(block.tokens)) for one, block in zip(sequences, blocks, strict=True)]
        )
        with _forgetting(sequences):
            asked = [self._ask(one, block) for one, block in zip(sequences, blocks, strict=True)]
        return Started(sequences, asked, perf_counter() - started)

    def finish(self, started: Started, *also: Array) -> StepResult:
        """The second half of `step`: evaluate the graph, and `also` what was built on it.

        Raises:
            ModelError: MLX could not compute it: there is no memory for it, most likely.
        """
        import mlx.core as mx

        began = perf_counter()
        with _forgetting(started.sequences):
            mx.eval(started.arrays, also)
        waited = perf_counter() - began
        return StepResult(
            started.logits(self.vocab_size),
            [each.taps for each in started.asked],
            started.seconds + waited,
            started.best(),
            {"graph": started.seconds, "device": waited},
        )

    def describe(self) -> dict[str, str]:
        """What costs and exactness depend on."""
        import platform
        from importlib.metadata import version

        return {
            "engine": self.name,
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "device": device(),
            "system": platform.platform(),
            "prompts": _PROMPTS,
            "rows": str(self.rows),
            "reads": str(self._reads),
            "min_rows": str(self.min_rows),
            "taps": ",".join(map(str, self.taps)),
        }

    def _ask(self, sequence: MlxSequence, block: Block) -> Asked:
        """Build the graph of one sequence's block."""
        import mlx.core as mx

        states = sequence.states
        self._run_again(sequence, states.settle(sequence.length))
        count = len(block.tokens)
        # What is short is one call, even where only the last row is wanted.
        short = block.rows > 0 and count <= self.rows.most
        # An answer's rows keep their role where no logits are wanted: when they are computed again.
        unread = count - block.rows if block.prefill and not short else 0
        taps = self._read(sequence, block.tokens[:unread])
        rest = on_device(block.tokens[unread:])
        logits = []
        for part in self.rows.cut(len(rest)):
            called = self.model.call(states, rest[part], least=self.rows.least, drafted=True)
            logits.append(called.logits)
            taps.append(called.taps)
        sequence.ran(block)
        tapped = TapArrays({tap: mx.concatenate([each[tap] for each in taps]) for tap in self.taps})
        if not block.rows:
            return Asked(None, None, tapped)
        wanted = mx.concatenate(logits)[-block.rows :].astype(mx.float32)
        if block.best:
            return Asked(None, (mx.argmax(wanted, axis=1), mx.max(wanted, axis=1)), tapped)
        return Asked(wanted, None, tapped)

    def _run_again(self, sequence: MlxSequence, held: int) -> None:
        """Run tokens that the model holds no more: a prompt's as a prompt, an answer's as rows."""
        if held == sequence.length:
            return
        read = max(sequence.shareable_length, held)
        self._read(sequence, sequence.tokens[held:read])
        rest = on_device(sequence.tokens[read:])
        for part in self.rows.cut(len(rest)):
            self.model.call(sequence.states, rest[part], least=self.rows.least, drafted=True)
        # Rows that filled the last call up go again. Some models cannot go back to the row.
        self._read(sequence, sequence.tokens[sequence.states.settle(sequence.length) :])

    def _read(self, sequence: MlxSequence, tokens: Sequence[int]) -> list[dict[int, Array]]:
        """Run tokens whose logits nobody wants; their taps."""
        import mlx.core as mx

        taps = []
        for at in range(0, len(tokens), self._reads):
            part = tokens[at : at + self._reads]
            taps.append(self.model.call(sequence.states, part).taps)
            if len(part) == self._reads:
                # So that the graph of a long prompt does not hold all its activations at once.
                mx.eval(taps[-1], sequence.states.arrays())
                mx.clear_cache()
        return taps

    def _call_once(self) -> tuple[int, int]:
        """Columns of the logits, and bytes of a slot.

        A model has arrays that are computed with the first call. They have to be there before
        another thread calls it.
        """
        import mlx.core as mx

        states = self.model.empty()
        logits = self.model.call(states, [0, 0]).logits
        mx.eval(logits, states.arrays())
        return logits.shape[-1], slot_bytes(states.caches)


def _own(sequence: KVSequence) -> MlxSequence:
    if not isinstance(sequence, MlxSequence):
        raise TypeError(f"a {type(sequence).__name__} is not a sequence of this engine")
    return sequence


@contextlib.contextmanager
def _forgetting(sequences: Sequence[MlxSequence]) -> Iterator[None]:
    """Forget what the model holds of sequences whose call fails: their tokens are run again."""
    try:
        yield
    except BaseException as error:
        for sequence in sequences:
            sequence.forget()
        if isinstance(error, RuntimeError):
            reason = in_a_line(error)
            raise ModelError(f"MLX failed: {reason}; a shorter prompt may help") from error
        raise
