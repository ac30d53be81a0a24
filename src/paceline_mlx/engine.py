"""Runs mlx-lm's models, on an Apple GPU or with MLX's CPU build.

A step builds the lazy graphs of all its blocks and evaluates them at once, so it waits for the
device once. Draft tokens that the device is still computing enter those graphs unevaluated.

Rows of several sequences share a forward pass if `probe.py` found that number of rows to be
bit-identical (`together.py`); else sequences run one after another. mlx-lm's batched caches are not
used: they pad on the left to the longest sequence, which changes the order of a row's sums.

Invariant: in forward passes whose logits are read, the total number of rows and the number per
sequence are ones that `probe.py` found to be bit-identical. The passes are cut where attention
changes kernels (`thresholds.py`). Prompt rows without logits run in longer passes without the head.
"""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time

import mlx.core as mx

from paceline.decoding.types import Block
from paceline.engines.base import EngineSettings, KVSequence, StepResult
from paceline.engines.kv_blocks import BlockPool, PooledEngine
from paceline.engines.rows import RowRules, grouped
from paceline.errors import InvalidRequest, ModelError
from paceline_mlx.caches import SLOTS, slot_bytes
from paceline_mlx.hooks import Array
from paceline_mlx.kv_sequence import MlxSequence
from paceline_mlx.model import LazyOutputs, LoadedModel, load, one_line
from paceline_mlx.probe import choose_rows, choose_together
from paceline_mlx.rows import ALONE, ANY, FEW_SHAPES, SECONDS, Budget
from paceline_mlx.step import BlockOutputs, Decode, TapArrays

_PROMPTS = "shared without their answers; calls cut where kernels change; sequences together"
"""How sequences are computed and shared. Change this string with any change to a row's bits or the
cost of a forward pass: stored measurements are then repeated."""


class MlxEngine(PooledEngine[MlxSequence]):
    """An engine for mlx-lm; see the top of this file. `step` is not thread-safe."""

    name = "mlx"
    _table_type = MlxSequence

    def __init__(
        self,
        folder: Path,
        context_length: int,
        settings: EngineSettings | None = None,
        *,
        rules: RowRules | None = None,
    ) -> None:
        """Load the checkpoint in a folder, for sequences of at most `context_length` slots.

        `rules` limit the rows per forward pass. None: measure them, unless `min_rows` is 1; passes
        are then not padded.

        Raises:
            ModelError: mlx-lm cannot load or run it.
            InvalidRequest: a tapped layer does not exist, or threads were set.
        """
        settings = settings or EngineSettings()
        if settings.threads is not None:
            raise InvalidRequest("the engine mlx has no setting for threads; remove threads")
        self.context_length = context_length
        self.min_rows = settings.min_rows
        self.taps = settings.taps
        self.model = LoadedModel(load(folder), settings.taps)
        """The model, for drafters that share its embeddings and head, or run it themselves."""
        unmeasured = FEW_SHAPES if self.model.few_shapes else ANY
        try:
            self.vocab_size, bytes_per_slot = self._call_once()
            if rules is None and settings.min_rows > 1:
                rules = self._measured(settings)._replace(prefill=unmeasured.prefill)
        except InvalidRequest:  # of the time limit
            raise
        except Exception as error:  # of any type: a config that does not match its weights
            raise ModelError(f"{folder} cannot be run by mlx-lm: {one_line(error)}") from error
        self.rules = rules or unmeasured
        """Rows per forward pass: in decode, whose logits are read, and in prefill."""
        tokens = settings.slots(context_length, bytes_per_slot)
        self._pool = BlockPool(-(-tokens // SLOTS), SLOTS)

    def open(self) -> MlxSequence:
        return MlxSequence(self._pool, self.context_length, self.model)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences and wait for the device once; see `Engine.step`.

        The result's `parts` are seconds: `graph` to build the graph on the host, and `device` to
        wait for the device. Raises ModelError if MLX fails, most likely for lack of memory.
        """
        started = perf_counter()
        sequences = self._reserve(work)
        try:
            outputs = self._build(sequences, [block for _, block in work])
            built = perf_counter()
            states = [sequence.states.arrays() for sequence in sequences]
            mx.eval([output.arrays for output in outputs], states)
        except BaseException as error:
            for sequence in sequences:
                sequence.forget()
            if isinstance(error, RuntimeError):
                reason = one_line(error)
                raise ModelError(f"MLX failed: {reason}; try a shorter prompt") from error
            raise
        ended = perf_counter()
        hosted = [output.on_host(self.vocab_size) for output in outputs]
        return StepResult(
            [logits for logits, _ in hosted],
            [output.taps for output in outputs],
            ended - started,
            [best for _, best in hosted],
            {"graph": built - started, "device": ended - built},
        )

    def describe(self) -> dict[str, str]:
        chip = mx.device_info().get("device_name", platform.machine())
        return {
            "engine": self.name,
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "device": f"{mx.default_device()} {chip}",
            "system": platform.platform(),
            "prompts": _PROMPTS,
            "rows": str(self.rules),
            "min_rows": str(self.min_rows),
            "taps": ",".join(map(str, self.taps)),
        }

    def _measured(self, settings: EngineSettings) -> RowRules:
        """Measure which numbers of rows are bit-identical, and up to how many keys."""
        # CPU time, where MLX runs on the CPU: other processes must not change the result.
        budget = Budget(process_time if mx.default_device() == mx.cpu else perf_counter)
        limit = f"{budget.seconds:g} s"
        settings.progress.note(f"checking that results are bit-identical, for at most {limit}")
        rules = choose_rows(self.model, self.context_length, budget)
        self.compared_keys = budget.keys
        if rules is None:
            self.min_rows, rules = 1, ALONE  # rows depend on T, or could
        else:
            together = choose_together(self.model, rules.decode, self.context_length, budget)
            rules = rules._replace(together=together)
        if budget.keys < self.context_length:
            settings.progress.note(
                f"`exact` is false for contexts of over {budget.keys} tokens: in {limit}, rows "
                f"were compared up to there; {SECONDS}={6 * budget.seconds:g} allows more time"
            )
        return rules

    def _build(
        self, sequences: Sequence[MlxSequence], blocks: Sequence[Block]
    ) -> list[BlockOutputs]:
        prefilled, decodes = [], []
        for sequence, block in zip(sequences, blocks, strict=True):
            self._recompute(sequence, sequence.states.accept(sequence.length))
            # A short block is one forward pass, even if only its last row gets logits. Recomputed
            # decode rows keep their kernel, though they get no logits.
            count = len(block.tokens)
            short = block.rows > 0 and count <= self.rules.decode.max_rows
            unread = count - block.rows if block.prefill and not short else 0
            prefilled.append(self._prefill(sequence, block.tokens[:unread]))
            decodes.append(Decode(sequence.states, block.tokens[unread:], self.rules))
        self._decode(decodes)
        outputs = []
        for sequence, block, taps, decode in zip(
            sequences, blocks, prefilled, decodes, strict=True
        ):
            sequence.ran(block)
            outputs.append(self._outputs(block, taps, decode.calls))
        return outputs

    def _outputs(
        self, block: Block, prefilled: list[dict[int, Array]], calls: list[LazyOutputs]
    ) -> BlockOutputs:
        taps = [*prefilled, *(called.taps for called in calls)]
        tapped = TapArrays(
            {tap: mx.concatenate([hidden[tap] for hidden in taps]) for tap in self.taps}
        )
        if not block.rows:
            return BlockOutputs(None, None, tapped)
        logits = mx.concatenate([called.logits for called in calls])
        logits = logits[-block.rows :].astype(mx.float32)
        if block.best:
            return BlockOutputs(None, (mx.argmax(logits, axis=1), mx.max(logits, axis=1)), tapped)
        return BlockOutputs(logits, None, tapped)

    def _recompute(self, sequence: MlxSequence, held: int) -> None:
        """Run tokens that the caches lost: prefilled ones with prefill, the others with decode."""
        if held == sequence.length:
            return
        prefilled = max(sequence.shareable_length, held)
        self._prefill(sequence, sequence.tokens[held:prefilled])
        self._decode([Decode(sequence.states, sequence.tokens[prefilled:], self.rules)])
        # Drop the last pass's padding. Models that cannot roll back that far run its tokens again.
        self._prefill(sequence, sequence.tokens[sequence.states.accept(sequence.length) :])

    def _decode(self, decodes: Sequence[Decode]) -> None:
        """Run tokens in forward passes whose rows are bit-identical in any pass; see `RowRules`."""
        min_rows, max_rows = self.rules.decode.min_rows, self.rules.together
        while waiting := [decode for decode in decodes if decode.parts]:
            for group in grouped(waiting, lambda some: sum(one.rows for one in some) <= max_rows):
                parts = [decode.next() for decode in group]
                calls = self.model.call_together(parts, min_rows=min_rows)
                for decode, called in zip(group, calls, strict=True):
                    decode.calls.append(called)

    def _prefill(self, sequence: MlxSequence, tokens: Sequence[int]) -> list[dict[int, Array]]:
        """Run tokens without logits; return the taps of each forward pass."""
        taps = []
        cuts = self.rules.cuts if self.model.few_shapes else ()
        for part_rows in self.rules.prefill.split(len(tokens), sequence.states.held, cuts):
            part = tokens[part_rows]
            taps.append(self.model.call(sequence.states, part).taps)
            if len(part) == self.rules.prefill.max_rows:
                # Bound the memory of a long prompt's graph: free its activations.
                mx.eval(taps[-1], sequence.states.arrays())
                mx.clear_cache()
        return taps

    def _call_once(self) -> tuple[int, int]:
        """Run the model once; return the width of its logits and the bytes per slot.

        Some arrays of a model are computed in its first forward pass, and must exist before another
        thread runs it.
        """
        states = self.model.empty()
        logits = self.model.call(states, [0, 0]).logits
        mx.eval(logits, states.arrays())
        return logits.shape[-1], slot_bytes(states.caches)
