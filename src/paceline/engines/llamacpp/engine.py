"""Runs GGUF files with llama.cpp or ik_llama.cpp, exactly, by rules for rows.

A step runs its blocks one after another, in the contexts of their sequences. The rows of a pass
belong to one sequence, so the pass's class depends on its block alone, never on the batch.
If several sequences share passes (`together.py`), all their rows are in the class together.

Invariant: every pass has a row count in its role's class (`engines/rows.py`): longer blocks
are divided, shorter ones padded. Padding comes after the rows, so no row sees it, and its slots
are dropped. No pass computes logits for more rows than a decode pass has.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from paceline.decoding.types import FINAL_NORM, Block, Logits, Taps, tap_name
from paceline.engines.base import EngineSettings, KVSequence, KVState, StepResult
from paceline.engines.exact import rows_hold, together_holds
from paceline.engines.kv_blocks import BlockPool, PooledEngine
from paceline.engines.llamacpp.binding import MAX_OUTPUTS, Binding, ContextSettings, Offload
from paceline.engines.llamacpp.libraries import (
    faster_build,
    installed,
    library_for,
    library_with_devices,
    load,
    offload_for,
)
from paceline.engines.llamacpp.native import NativeModel, NativeSequence, Sizes
from paceline.engines.llamacpp.packed import PackedWeights
from paceline.engines.llamacpp.recurrent import RecurrentSequence
from paceline.engines.llamacpp.rules import (
    CONTEXTS,
    DEVICE_CONTEXTS,
    KEY_RUN,
    MAX_ROWS,
    UNPADDED,
    fewer_kernels,
    may_be_single,
    table_rules,
)
from paceline.engines.llamacpp.sequence import (
    PADDING,
    Contexts,
    LlamaSequence,
    call,
    round_up_slots,
)
from paceline.engines.llamacpp.together import SharedBlock, run_shared, shared_calls
from paceline.engines.llamacpp.weights import check_numbers
from paceline.engines.rows import RowRules, load_rules, save_rules
from paceline.errors import ModelError
from paceline.storage.files import digest_of
from paceline.storage.gguf_file import read_gguf
from paceline.storage.progress import Progress
from paceline.system.machine import cpu_cores, gpu_drivers, memory_bytes, processor

if TYPE_CHECKING:
    from paceline.engines.llamacpp.draft_context import OpenDrafter

SLOTS = 32
"""Slots of a KV block; these blocks only count slots."""

_MAX_CONTEXTS = 12
"""Maximum contexts with a sequence; further sequences are evicted."""

_STATE_BYTES = 2 << 30
"""Maximum bytes of recurrent states in a model's contexts, if there are several."""

_EMBEDDED_ROWS = 64
"""Maximum rows of a pass for embeddings: each also gets logits, which are not read."""

_FORM = 14
"""Version of the row-rule table and its verification; rules of other versions are ignored."""

_ROWS = "one sequence in a call, or rows of several in a class"
"""How rows are computed. Change this string with any change to a row's bits or a pass's cost:
stored measurements are then repeated."""

_STATES = "rolled back, checkpoints"
"""How recurrent states are restored; change it like `_ROWS`."""


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
        rules: RowRules | None = None,
        offload: Offload | None = None,
    ) -> None:
        """Map a GGUF file, and verify which rows its passes may have.

        Args:
            path: the file.
            context_length: maximum slots of a sequence, from the model's training.
            settings: see `EngineSettings`. With `min_rows` 1, passes are not padded.
            binding: the library; None: the first installed one that computes the file correctly.
            rules: rows of a pass; None: the library's, verified.
            offload: layers on a device of `binding`; see `offload_for`.

        Raises:
            MissingExtra: no library is installed, or none that runs on this CPU.
            ModelError: no library computes the file correctly, or it refuses it.
            InvalidRequest: hidden states other than those of embeddings are needed.
        """
        settings = settings or EngineSettings()
        self.context_length = context_length
        self.taps: tuple[int, ...] = settings.taps
        self._threads = settings.threads or cpu_cores()
        self._measurements = settings.measurements
        self.path = path
        """The GGUF file, under the name given."""
        self._packed = PackedWeights(settings.packed)
        # On a GPU, rows of several sequences in one pass differed from those of each alone.
        self._parallel = 1 if offload else settings.parallel
        self._offload = offload
        self._quantized = settings.kv_cache_type is not None
        self._binding = library_for(
            path,
            installed() if binding is None else (binding,),
            lambda library: load_rules(self._rules_path(library)) is not None,
            taps=settings.taps,
            shared=settings.parallel > 1,
            quantized=self._quantized,
        )
        self.remark = faster_build(self._binding)
        """A remark that `plan` prints with the costs."""
        if self._parallel > 1 and not self._binding.shares_calls(read_gguf(path)):
            self._parallel = 1
        self._model = self._open(settings.progress)
        self.vocab_size = self._model.vocab_size
        if self._model.recurrent:
            self._table_type = RecurrentSequence
        # For each run of keys: True if a single row may follow it.
        runs = range(0, context_length + 1, KEY_RUN)
        self._single_keys = [may_be_single(self._model, self._threads, keys) for keys in runs]
        sizes = self._model.sizes(self._threads)
        slots = settings.slots(context_length, sizes.slot)
        if offload is None:
            self._check_memory(slots, sizes)
        else:
            slots = min(slots, offload.slots)
        if rules is None and settings.min_rows > 1:
            rules = self._row_rules(sizes, settings.progress)
        self._use(rules or UNPADDED, sizes, slots)
        # One row is exact where it has the same bits, or where each row runs alone.
        self.min_rows = max(self.rules.decode.min_rows, settings.min_rows)

    def _use(self, rules: RowRules, sizes: Sizes, slots: int) -> None:
        """Run passes by `rules`, in new contexts, with a KV cache of `slots` slots."""
        self.rules = rules
        self.min_rows = rules.decode.min_rows
        self._pool = BlockPool(-(-slots // SLOTS), SLOTS)
        # At least one: with 0, a context treats its sequences as ones that can be cut anywhere.
        self._rollback = max(rules.rollback, 1) if self._model.recurrent else 0
        states = (1 + self._rollback) * sizes.state
        self.shares_calls = rules.together > 1
        outputs = max(MAX_OUTPUTS, rules.together, _EMBEDDED_ROWS * len(self.taps))
        parallel = self._parallel if self.shares_calls else 1
        layers = tuple(tap for tap in self.taps if tap != FINAL_NORM)
        # A program that uses the engine directly may run it while the scheduler calls `rest`.
        self._stepping = Lock()
        self._contexts = Contexts(
            self._model,
            self.context_length,
            ContextSettings(0, MAX_ROWS, self._threads, self._rollback, parallel, outputs, layers),
            max_contexts=max(min(max(_STATE_BYTES // max(states, 1), 1), _MAX_CONTEXTS), parallel),
            max_slots=round_up_slots(slots + MAX_ROWS),
        )

    def open(self) -> LlamaSequence:
        sequence = self._table_type(self._pool, self.context_length, self._contexts)
        sequence.shares_answers = self.rules.one_class and not self._model.recurrent
        return sequence

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        with self._stepping:
            return self._step(work)

    def _step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        started = perf_counter()
        sequences = self._reserve(work)
        logits: dict[int, Logits] = {}
        taps: list[Taps] = [{} for _ in work]
        # In the order of `work`, each of many sequences would have lost its own context.
        order = sorted(range(len(work)), key=lambda at: sequences[at].is_evicted)
        longest = self.rules.decode.max_rows if self.shares_calls else 0
        shared = [
            at for at in order if not work[at][1].prefill and len(work[at][1].tokens) <= longest
        ]
        for at in order:
            if FINAL_NORM in self.taps and work[at][1].prefill and not work[at][1].rows:
                taps[at] = self._embed(sequences[at], work[at][1])
                logits[at] = np.empty((0, self.vocab_size), np.float32)
            elif len(shared) < 2 or at not in shared:
                rows = self._run(sequences[at], work[at][1])
                # The next block may take over this one's context, with its logits.
                logits[at] = rows.copy() if len(work) > 1 else rows
                taps[at] = sequences[at].taps
        while len(logits) < len(work):
            waiting = [at for at in shared if at not in logits]
            blocks = [(sequences[at], work[at][1]) for at in waiting]
            for index, rows in self._run_together(blocks).items():
                logits[waiting[index]] = rows
                taps[waiting[index]] = sequences[waiting[index]].taps
        seconds = perf_counter() - started
        return StepResult([logits[at] for at in range(len(work))], taps, seconds)

    @property
    def can_export_kv(self) -> bool:
        """True if it supports this model; recurrent layers have states besides KV."""
        return not self._model.recurrent

    def state_of(self, sequence: KVSequence) -> KVState:
        """Copy the KV of a sequence whose slots are all shareable."""
        table = self._table(sequence)
        place = table.place(0)
        table.prepare(place, lambda _: None)
        return KVState(place.state(), table.length)

    def restore(self, sequence: KVSequence, state: KVState, length: int) -> None:
        """Replace a sequence with the first `length` slots of a state, as if they were prefilled.

        Raises CacheFull, or ModelError for an unreadable state; the sequence is then empty.
        """
        self._table(sequence).restore(state, length)

    def open_drafter(self, path: Path) -> "OpenDrafter":
        """Open the file of a drafter with a network. Raises ModelError if it is refused."""
        from paceline.engines.llamacpp.draft_context import OpenDrafter
        from paceline.engines.llamacpp.upstream import Llama

        binding = load("llama.cpp")
        assert isinstance(binding, Llama)
        if path != self.path:  # the model's own file was checked when it was opened
            check_numbers(path, read_gguf(path))
        return OpenDrafter(binding, path, self.path, self._threads)

    def rest(self) -> None:
        """Park all sequences: a context needs far more memory than its keys and values."""
        with self._stepping:
            self._contexts.rest()

    def close(self) -> None:
        self._contexts.close()
        self._model.close()

    def describe(self) -> dict[str, str]:
        """Return everything that costs and exactness depend on; recorded results contain it."""
        cache = "keys and values in f16" if self._offload else self._binding.cache
        cache = "keys and values in q8_0" if self._quantized else cache
        packed = "; packed weights" * self._model.packed
        return {
            **self._depends(self._binding),
            "rows": f"{_ROWS}, {cache}; {self.rules}{packed}",
            "min_rows": str(self.min_rows),
            **({"states": f"{_STATES}, {self._rollback} rows"} if self._rollback else {}),
        }

    def _open(self, progress: Progress) -> NativeModel:
        """Map the packed copy of the file, or the file itself."""
        offload = self._offload
        open_ = partial(NativeModel, self._binding, quantized=self._quantized, offload=offload)
        copy = self._packed.find_or_make(self.path, self._binding, progress)
        if copy is None:
            return open_(self.path)
        try:
            return open_(copy, packed=True)
        except ModelError:
            model = open_(self.path)
        self._packed.refuse(self.path, self._binding)
        return model

    def _check_memory(self, slots: int, sizes: Sizes) -> None:
        """Raise ModelError if weights, which are mapped, and full caches do not fit into memory.

        The recurrent states of one context must also fit.
        """
        slot_bytes, state_bytes = sizes
        weights, memory = self._model.path.stat().st_size, memory_bytes()
        states = (1 + UNPADDED.rollback) * state_bytes
        if weights + states + slots * slot_bytes > memory:
            fitting = max((memory - weights - states) // max(slot_bytes, 1), 0)
            self._model.close()
            also = f" and {states >> 20} MiB of recurrent states" if states else ""
            raise ModelError(
                f"{self._model.path.name} needs {weights >> 20} MiB{also}, and {slots} tokens need "
                f"{slots * slot_bytes >> 20} MiB of keys and values, but this machine has "
                f"{memory >> 20} MiB of memory; use --cache-tokens {fitting} or fewer, or a "
                "smaller model"
            )

    def _row_rules(self, sizes: Sizes, progress: Progress) -> RowRules:
        """Return the model's rules, verified unless that was done before on this machine."""
        path = self._rules_path(self._binding)
        if (rules := load_rules(path)) is None:
            with progress.task("measuring which forward passes are exact, once per model"):
                rules = self._verified(sizes)
            save_rules(path, rules)
        return rules

    def _verified(self, sizes: Sizes) -> RowRules:
        """Return the table's rules that hold on this machine, or those with the fewest kernels."""
        contexts = DEVICE_CONTEXTS if self._offload else CONTEXTS
        slots = 2 * round_up_slots(contexts[-1] + MAX_ROWS)
        content, shared = read_gguf(self.path), self._parallel > 1
        table = table_rules(self._model, content, self._threads, self.context_length, shared=shared)
        for rules in fewer_kernels(table):
            self._use(rules, sizes, slots)
            with closing(self._contexts):
                single = rules.single or self._offload
                holds = rows_hold(self, contexts if single else contexts[:2])
                if holds and (not self.shares_calls or together_holds(self)):
                    break
        return rules

    def _rules_path(self, binding: Binding) -> Path | None:
        """Return the path of stored rules: a file named after everything that they depend on."""
        if self._measurements is None:
            return None
        stat = (self._packed.find(self.path, binding) or self.path).stat()
        identity = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        settings = (self._parallel > 1, self._quantized)
        depends = self._depends(binding).values()
        return self._measurements / f"{digest_of([_FORM, *settings, *depends, *identity])}.rows"

    def _depends(self, binding: Binding) -> dict[str, str]:
        device = {"device": str(self._offload), "drivers": gpu_drivers()} if self._offload else {}
        return {
            "engine": self.name,
            "library": f"{binding.name} {binding.version}",
            "processor": processor(),
            "threads": str(self._threads),
            **device,
        }

    @contextmanager
    def _place(self, sequence: LlamaSequence, block: Block) -> Iterator[NativeSequence]:
        padding = max(self.rules.decode.min_rows, self.rules.prefill.min_rows)
        try:
            place = sequence.place(len(block.tokens) + padding)
            sequence.prepare(place, partial(self._calls, sequence, place))
            yield place
        except BaseException:  # also Ctrl-C: a pass may have ended without being counted
            sequence.failed()
            raise
        sequence.ran(block)

    def _run(self, sequence: LlamaSequence, block: Block) -> Logits:
        """Run a block; return the logits of its trailing `block.rows` rows."""
        with self._place(sequence, block) as place:
            return self._calls(sequence, place, block)

    def _embed(self, sequence: LlamaSequence, block: Block) -> Taps:
        """Run a block of a text; return its rows after the last norm, [rows, d] float32."""
        role = self.rules.prefill
        range_ = role._replace(max_rows=min(role.max_rows, _EMBEDDED_ROWS))
        hidden = []
        with self._place(sequence, block) as place:
            for part in sequence.parts(block, place.length, range_, _EMBEDDED_ROWS):
                tokens, start = block.tokens[part], place.length
                padded = [*tokens, *[PADDING] * (role.min_rows - len(tokens))]
                hidden.append(place.embed(padded)[: len(tokens)])
                place.truncate(start + len(tokens))
        return {tap_name(FINAL_NORM): np.concatenate(hidden)}

    def _run_together(self, work: Sequence[tuple[LlamaSequence, Block]]) -> dict[int, Logits]:
        """Run blocks of decoding sequences in few passes, for as many sequences as have places.

        Returns the logits of their trailing rows, by index, for at least one sequence.
        """
        padding = self.rules.decode.max_rows
        places = [sequence.place(len(block.tokens) + padding) for sequence, block in work]
        rows: dict[int, SharedBlock] = {}
        for index, ((sequence, block), place) in enumerate(zip(work, places, strict=True)):
            if not sequence.is_evicted:  # makes a place for a later one
                sequence.prepare(place, lambda _: None)
                rows[index] = SharedBlock(place, block)
        logits: dict[int, Logits] = {}
        for call_ in shared_calls(rows, self.rules.together):
            if len(call_) > 1:
                logits |= run_shared({index: rows[index] for index in call_})
            for index in call_:
                sequence, block = work[index]
                if len(call_) > 1:
                    tapped = rows[index].place.taps.items()
                    sequence.taps = {name: rows_[: len(block.tokens)] for name, rows_ in tapped}
                    sequence.ran(block)
                else:
                    logits[index] = self._run(sequence, block).copy()
        return logits

    def _calls(self, sequence: LlamaSequence, place: NativeSequence, block: Block) -> Logits:
        count = len(block.tokens)
        role = self.rules.prefill if block.prefill else self.rules.decode
        single = count == 1 and not block.prefill and self.rules.single
        min_rows = 1 if single and self._single_keys[place.length // KEY_RUN] else role.min_rows
        first = count - block.rows
        parts = sequence.parts(block, place.length, role, self.rules.decode.max_rows)
        logits = []
        taps = defaultdict[str, list[Logits]](list)
        for part in parts:
            sequence.on_rows_computed(place, part.start)
            rows = call(
                place,
                block.tokens,
                part,
                first=first,
                min_rows=min_rows,
                min_outputs=self.rules.outputs,
            )
            # The context's next pass overwrites these logits.
            logits.append(rows.copy() if len(parts) > 1 else rows)
            for name, hidden in place.taps.items():
                taps[name].append(hidden[: part.stop - part.start])
        sequence.on_rows_computed(place, count)
        sequence.taps = {name: np.concatenate(hidden) for name, hidden in taps.items()}
        return np.concatenate(logits) if len(parts) > 1 else logits[0]


def open_llamacpp(
    path: Path, context_length: int, settings: EngineSettings, binding: Binding | None = None
) -> LlamaCppEngine:
    """Open a GGUF file where `settings.device` says; see `LlamaCppEngine`.

    Raises InvalidRequest for a missing device, MissingExtra if its library is not installed.
    """
    library = binding or library_with_devices(settings.device)
    devices = library.devices() if library and settings.device != "cpu" else []
    offload = library and offload_for(library, devices, path, context_length, settings)
    engine = None
    if offload:
        try:
            engine = LlamaCppEngine(
                path, context_length, settings, binding=library, offload=offload
            )
        except ModelError as error:
            if settings.device != "auto":
                raise
            settings.progress.note(f"{path.name} runs on the CPU: {error}")
    where = str(offload) if engine else "all layers on the CPU"
    engine = engine or LlamaCppEngine(path, context_length, settings, binding=binding)
    if devices:
        engine.remark = f"{where}; devices: {', '.join(map(str, devices))}"
    return engine
