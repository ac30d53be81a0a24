"""Runs a PagedAttention model through OpenVINO, with the KV cache in tensors of this engine.

Invariant: a row's bits depend neither on the batch nor on T. Three causes, all measured, and
measured again on every machine (`engines/invariance.py`):

- attention gets decode rows one by one and prefill rows at least two at a time;
- the layers get at least two rows in all, because one row takes another kernel;
- the cache is f16: 8-bit caches share a scale between neighbouring slots, rejected ones included.

A step allocates no tensors: it copies numbers into tensors that are already bound.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block, Taps, tap_name
from paceline.engines.base import EngineSettings, KVSequence, StepResult
from paceline.engines.kv_blocks import BlockPool, PooledEngine, PrefillTable
from paceline.engines.openvino.batch import (
    KV_CACHES,
    Batch,
    CompiledGraph,
    Placed,
    graph_of_batch,
    graph_of_block,
    parts_of,
    sizes,
)
from paceline.engines.openvino.gguf_graph import gguf_model
from paceline.engines.openvino.gguf_rows import MOST_ROWS, rows_are_invariant
from paceline.engines.openvino.graph import STATE_TABLES, paged_model
from paceline.engines.openvino.kv_copies import Caches, extend_kv, kv_of
from paceline.engines.state_blocks import StatePool, StateTable, restore_and_take
from paceline.errors import ModelError
from paceline.storage.gguf import graph_fault
from paceline.storage.openvino import core, reason_of
from paceline.storage.system import memory_bytes

_COPIES = 3
_MOST_COPIED_SHARE = 0.1
_PACKED_AT_ONCE_BYTES = 1 << 28
"""The graph is compiled `_COPIES` times where the weights are at most so large, which takes a few
tenths of a second to pack, and where all copies of them, all of them packed, take at most that
share of the machine's memory. With larger ones, start and memory would be two to three times as
large, to save about 5 ms where the number of rows changes (docs/decisions/gguf-weights.md).
"""

_KV_PRECISION = "f16"
"""Of OpenVINO's types of KV caches, the one in which a row's KV depends on that row alone."""

_ATTENTION = "an answer's rows one by one"
"""How rows are computed. Change this string with any change to a row's bits or a call's cost:
stored profiles are then measured again."""

_WEIGHTS = "as in the GGUF file, 2"
"""The same for the graph of a GGUF file, and its weights."""

_STATES = "a block per row, f32"
"""The same for recurrent layers and their states."""


class OpenVinoEngine(PooledEngine[PrefillTable]):
    """The engine; see the top of this file. `step` is not thread-safe."""

    name = "openvino"
    _table_type = PrefillTable

    def __init__(
        self, graph: Path, context_length: int, settings: EngineSettings | None = None
    ) -> None:
        """Compile a model.

        Args:
            graph: the `openvino_model.xml` of a stateful language model, or a GGUF file.
            context_length: most slots of a sequence, as the model was trained.
            settings: see `EngineSettings`.

        Raises:
            ModelError: the file is not such a model, or its cache does not fit into memory.
        """
        settings = settings or EngineSettings()
        self.min_rows = settings.min_rows
        self.context_length = context_length
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": _KV_PRECISION,
            # The default on a CPU with bf16 is bf16: no faster here, and less precise.
            "INFERENCE_PRECISION_HINT": "f32",
            # 8-bit activations with 8-bit weights, one scale per 32: twice as fast from 6 rows on
            # (docs/decisions/openvino-from-python.md).
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if settings.round_inputs else "0",
        }
        if settings.threads is not None:
            options["INFERENCE_NUM_THREADS"] = str(settings.threads)
        self._compile = partial(_compile, graph, settings.taps, options)
        model = _open(graph, settings.taps)
        try:
            with ThreadPoolExecutor() as pool:
                futures = [
                    pool.submit(CompiledGraph, model, options) for _ in range(_copies(graph))
                ]
                self._graphs = [future.result() for future in futures]
        except RuntimeError as error:
            raise _does_not_run(graph, error) from error
        compiled = self._graphs[0].compiled
        self._threads: int = compiled.get_property("INFERENCE_NUM_THREADS")
        if len(self._graphs) > 1:
            for compiled_graph, its_sizes in zip(
                self._graphs, sizes(self.min_rows, self._threads), strict=True
            ):
                compiled_graph.sizes = its_sizes
        self.taps = settings.taps
        self._round_inputs = settings.round_inputs
        self.vocab_size = compiled.output("logits").partial_shape[-1].get_length()
        self._bound: dict[str, tuple[Any, Any]] = {}
        self._states = self._make_states(settings, graph)
        self.most_sequences = None if self._states is None else self._states.most_sequences
        self._pool = self._make_cache(settings, graph)
        for compiled_graph in self._graphs:
            self._bind(compiled_graph)
        self.warm_rows = _warm_rows(graph)
        self._of_gguf = graph.suffix == ".gguf"
        self._most_rows = MOST_ROWS if self._of_gguf or not rows_are_invariant() else None
        if self._of_gguf and not self.warm_rows:
            self._check_shapes(graph)

    def open(self) -> PrefillTable:
        """A new, empty sequence."""
        if self._states is not None:
            return StateTable(self._pool, self._states, self.context_length)
        return PrefillTable(self._pool, self.context_length)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences in one call; see `Engine.step`."""
        tables = self._reserve(work)
        blocks = [block for _, block in work]
        call = [(table, block, table.length) for table, block in zip(tables, blocks, strict=True)]
        if self._most_rows and sum(len(block.tokens) for block in blocks) > self._most_rows:
            return self._run_parts(call, self._most_rows)
        restored = self._take_states(call)
        for table, block, _ in call:
            table.ran(block)
        graph, starts, seconds = self._run(call)
        logits = graph.output("logits")
        per_block = []
        at = 0
        for _, block in work:
            per_block.append(logits[at : at + block.rows])
            at += block.rows
        return StepResult(per_block, self._tapped(graph, starts, work), restored + seconds)

    def _run_parts(self, call: Sequence[Placed], most: int) -> StepResult:
        """Run a step in calls of at most `most` rows; its arrays are copies."""
        logits: list[list[Any]] = [[] for _ in call]
        taps: list[list[Taps]] = [[] for _ in call]
        seconds = 0.0
        for table, block, _ in call:
            table.ran(block)
        for part in parts_of(call, most):
            placed = [placement for _, placement in part]
            seconds += self._take_states(placed)
            graph, starts, run_seconds = self._run(placed)
            seconds += run_seconds
            for number, (table, block, past) in part:
                _, whole, start = call[number]
                if isinstance(table, StateTable) and past + len(block.tokens) < start + len(
                    whole.tokens
                ):
                    table.keep_written()
            part_logits, at = graph.output("logits"), 0
            tapped = self._tapped(graph, starts, [(table, block) for _, (table, block, _) in part])
            for (number, (_, block, _)), block_taps in zip(part, tapped, strict=True):
                logits[number].append(part_logits[at : at + block.rows].copy())
                taps[number].append({name: rows.copy() for name, rows in block_taps.items()})
                at += block.rows
        joined = [
            {name: np.concatenate([part_taps[name] for part_taps in parts]) for name in parts[0]}
            for parts in taps
        ]
        return StepResult(
            [np.concatenate(block_logits) for block_logits in logits], joined, seconds
        )

    @property
    def keeps_kv(self) -> bool:
        """Whether KV is all that a sequence has; see `KeepsKV`."""
        return self._states is None

    def kv_of(self, sequence: KVSequence, start: int, stop: int) -> Caches:
        """Copies of the KV of whole blocks of slots; see `KeepsKV`."""
        return kv_of(self._table(sequence), self.block_size, self._caches(), start, stop)

    def extend_kv(self, sequence: KVSequence, arrays: Caches) -> None:
        """Append KV of whole blocks; see `KeepsKV`."""
        extend_kv(self._table(sequence), self.block_size, self._caches(), arrays)

    def _caches(self) -> Caches:
        ports = self._graphs[0].ports(KV_CACHES)
        return {port.any_name: self._bound[port.any_name][0] for port in ports}

    def describe(self) -> dict[str, str]:
        """Everything that costs and exactness depend on; recorded results hold these strings."""
        import openvino as ov

        return {
            "engine": self.name,
            "openvino": ov.get_version(),
            "device": core().get_property("CPU", "FULL_DEVICE_NAME"),
            "threads": str(self._threads),
            "min_rows": str(self.min_rows),
            "kv_cache": _KV_PRECISION,
            "lanes": "|".join(
                ",".join(map(str, graph.sizes)) for graph in self._graphs if graph.sizes
            ),
            "attention": _ATTENTION,
            "taps": ",".join(map(str, self.taps)),
            **({} if self._round_inputs else {"inputs": "f32"}),
            **({"weights": _WEIGHTS} if self._of_gguf else {}),
            **({"most_rows": str(self._most_rows)} if self._most_rows else {}),
            **({"states": _STATES} if self._states is not None else {}),
        }

    def _check_shapes(self, graph: Path) -> None:
        """Run two rows: some faults of a GGUF file's metadata appear only then.

        Raises ModelError.
        """
        sequence = self.open()
        try:
            self.step([(sequence, Block([0, 0], 1))])
        except RuntimeError as error:
            raise _does_not_run(graph, error) from error
        finally:
            sequence.close()

    def _run(
        self, call: Sequence[tuple[PrefillTable, Block, int]]
    ) -> tuple[CompiledGraph, list[int], float]:
        """Run blocks, (sequence, block, slots before it).

        Returns the graph with the outputs, the first rows of the blocks, and seconds.
        """
        graph, min_rows = self._choose_graph([block for _, block, _ in call])
        batch = Batch(
            min_rows,
            threads=self._threads,
            spare=self._pool.spare,
            by_row=self._graphs[0].by_row,
            states=self._states,
        )
        for table, block, past in call:
            batch.add(table, block, past)
        return graph, batch.starts, graph.run(batch.inputs())

    def _take_states(self, call: Sequence[Placed]) -> float:
        """Allocate the state blocks of a call; returns seconds of running missing rows again."""
        if self._states is None:
            return 0.0
        hybrids = [
            (table, block, past) for table, block, past in call if isinstance(table, StateTable)
        ]
        seconds = 0.0

        def run(table: StateTable, block: Block, past: int) -> None:
            nonlocal seconds
            seconds += self._run([(table, block, past)])[2]

        restore_and_take(self._states, hybrids, run)
        return seconds

    def _choose_graph(self, blocks: Sequence[Block]) -> tuple[CompiledGraph, int]:
        """The compiled graph for a call, and the call's least number of rows.

        The graph for several sequences is compiled on first use: it takes as much memory as any
        other.
        """
        if not self._graphs[0].sizes:
            return self._graphs[0], self.min_rows
        if len(blocks) == 1:
            return graph_of_block(self._graphs, blocks[0], self.min_rows, self._threads)
        if self._graphs[-1].sizes:
            self._graphs.append(self._compile())
            self._bind(self._graphs[-1])
        return graph_of_batch(self._graphs, blocks, self.min_rows)

    def _tapped(
        self, graph: CompiledGraph, starts: list[int], work: Sequence[tuple[KVSequence, Block]]
    ) -> list[Taps]:
        names = [tap_name(tap) for tap in self.taps]
        whole = {name: graph.output(name) for name in names}
        return [
            {name: rows[start : start + len(block.tokens)] for name, rows in whole.items()}
            for start, (_, block) in zip(starts, work, strict=True)
        ]

    def _make_cache(self, settings: EngineSettings, graph: Path) -> BlockPool:
        """Make zeroed key and value tensors; returns the pool of their KV blocks."""
        ports = self._graphs[0].ports(KV_CACHES)
        shapes, dtype = _shapes(ports), np.dtype(ports[0].get_element_type().to_dtype())
        block_size = min(shape[1] for shape in shapes.values())  # 8-bit keys: scales beside slots
        block_bytes = sum(map(prod, shapes.values())) * dtype.itemsize
        tokens = settings.slots(self.context_length, block_bytes // block_size)
        blocks = -(-tokens // block_size)
        try:
            self._make_tensors(shapes, blocks + 1, dtype)  # and the spare block
        except (MemoryError, ValueError) as error:  # ValueError: beyond any address
            raise ModelError(
                f"no memory for a cache of {tokens} tokens of {graph.parent.name} "
                f"({blocks * block_bytes / 2**30:.1f} GiB); set cache_tokens lower"
            ) from error
        return BlockPool(blocks, block_size)

    def _make_states(self, settings: EngineSettings, graph: Path) -> StatePool | None:
        """Make zeroed state tensors; returns the pool of their blocks, None without any."""
        shapes = _shapes(self._graphs[0].ports(STATE_TABLES))
        if not shapes:
            return None
        block_bytes = sum(map(prod, shapes.values())) * 4
        blocks = settings.state_blocks(block_bytes)
        needed = (blocks + 2) * block_bytes  # with the zeros and the spare block
        memory = memory_bytes()
        refused = ModelError(
            f"no memory for the states of {graph.parent.name}: {blocks + 2} blocks of "
            f"{block_bytes / 2**20:.1f} MiB ({needed / 2**30:.1f} GiB), and this machine has "
            f"{memory / 2**30:.1f} GiB; use a smaller model"
        )
        if needed > memory:
            raise refused
        try:
            self._make_tensors(shapes, blocks + 2, np.float32)
        except (MemoryError, ValueError) as error:  # ValueError: beyond any address
            raise refused from error
        return StatePool(blocks)

    def _make_tensors(
        self, shapes: Mapping[str, Sequence[int]], blocks: int, dtype: npt.DTypeLike
    ) -> None:
        import openvino as ov

        for name, shape in shapes.items():
            # The system allocates zeroed pages on first write, so unused blocks cost nothing.
            # And a NaN in a masked slot would reach the sums.
            zeros = np.zeros([blocks, *shape], dtype)
            # OpenVINO holds no reference to these arrays and tensors: the engine must.
            self._bound[name] = zeros, ov.Tensor(zeros, shared_memory=True)

    def _bind(self, graph: CompiledGraph) -> None:
        for name, (_, tensor) in self._bound.items():
            graph.bind(name, tensor)


def _shapes(ports: Sequence[Any]) -> dict[str, list[int]]:
    """Input name -> shape of one block."""
    return {
        port.any_name: [dimension.get_length() for dimension in list(port.partial_shape)[1:]]
        for port in ports
    }


def _does_not_run(graph: Path, error: RuntimeError) -> ModelError:
    if graph.suffix == ".gguf":
        return graph_fault(graph, reason_of(error))
    return ModelError(f"{graph} cannot be run by OpenVINO: {reason_of(error)}; convert it again")


def _open(graph: Path, taps: Sequence[int]) -> Any:
    return (gguf_model if graph.suffix == ".gguf" else paged_model)(graph, taps)


def _compile(graph: Path, taps: Sequence[int], options: Mapping[str, str]) -> CompiledGraph:
    return CompiledGraph(_open(graph, taps), options)


def _copies(graph: Path) -> int:
    """Number of compiled graphs: one for all calls, or `_COPIES` where these take little."""
    size = _weights_bytes(graph)
    fits = 2 * _COPIES * size <= _MOST_COPIED_SHARE * memory_bytes()
    return _COPIES if fits and size <= _PACKED_AT_ONCE_BYTES else 1


def _weights_bytes(graph: Path) -> int:
    weights = graph if graph.suffix == ".gguf" else graph.with_suffix(".bin")
    return weights.stat().st_size if weights.exists() else 0


def _warm_rows(graph: Path) -> tuple[int, ...]:
    """See `Engine`: OpenVINO packs weights in the first call.

    Without AVX-512, some products of eight rows take another form of them than those of two.
    """
    return () if _weights_bytes(graph) <= _PACKED_AT_ONCE_BYTES else (2, 8)
