"""Runs a PagedAttention model through OpenVINO, with the KV cache in tensors of this engine.

Invariant: a row's bits depend neither on the batch nor on T. Three causes, all measured, and
measured again on every machine:

- attention gets decode rows one by one and prefill rows at least two at a time;
- the layers get at least two rows in all, because one row takes another kernel;
- the cache is f16: 8-bit caches share a scale between neighbouring slots, rejected ones included.

A step allocates no tensors: it copies numbers into tensors that are already bound.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block
from paceline.engines.base import EngineSettings, KVSequence, StepResult
from paceline.engines.kv_blocks import BlockPool, PooledEngine, PrefillTable
from paceline.errors import InvalidRequest, ModelError
from paceline.storage.system import memory_bytes
from paceline_openvino.batch import (
    CallInputs,
    CompiledGraph,
    Placed,
    graph_of_batch,
    graph_of_block,
    parts_of,
    sizes,
)
from paceline_openvino.graph import GRAPH, paged_model
from paceline_openvino.library import core, openvino, reason_of
from paceline_openvino.rows import MOST_ROWS, rows_are_invariant

_COPIES = 3
_MAX_COPIED_SHARE = 0.1
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
stored measurements are then made again."""


def open_engine(path: Path, context_length: int, settings: EngineSettings) -> "OpenVinoEngine":
    """Open the model in the folder `path`.

    Raises:
        InvalidRequest: it is a GGUF file, or hidden states are needed.
        ModelError: it is no language model, or its cache does not fit into memory.
        MissingExtra: OpenVINO is not installed.
    """
    if not path.is_dir():
        raise InvalidRequest(
            f"{path} is a GGUF file, and the engine openvino opens folders of OpenVINO IR; leave "
            "--engine away, or use a model of the hub whose name ends with -ov"
        )
    if settings.taps:
        raise InvalidRequest(
            "the engine openvino returns no hidden states, which a drafter or embeddings need; use "
            "a GGUF file of the model, or another drafter"
        )
    return OpenVinoEngine(path, context_length, settings)


class OpenVinoEngine(PooledEngine[PrefillTable]):
    """The engine; see the top of this file. `step` is not thread-safe."""

    name = "openvino"
    _table_type = PrefillTable

    def __init__(self, folder: Path, context_length: int, settings: EngineSettings) -> None:
        """Compile the model in `folder`; see `open_engine`."""
        self.min_rows = settings.min_rows
        self.context_length = context_length
        self.taps: tuple[int, ...] = ()
        self._path = folder / GRAPH
        self._options = {
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": _KV_PRECISION,
            # The default on a CPU with bf16 is bf16: no faster here, and less precise.
            "INFERENCE_PRECISION_HINT": "f32",
            # 8-bit activations with 8-bit weights, one scale per 32: twice as fast from 6 rows on
            # (docs/decisions/openvino-from-python.md).
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32",
        }
        if settings.threads is not None:
            self._options["INFERENCE_NUM_THREADS"] = str(settings.threads)
        weights = self._path.with_suffix(".bin").stat().st_size
        model = paged_model(self._path)
        try:
            with ThreadPoolExecutor() as pool:
                futures = [
                    pool.submit(CompiledGraph, model, self._options)
                    for _ in range(_copies(weights))
                ]
                self._graphs = [future.result() for future in futures]
        except RuntimeError as error:
            raise ModelError(
                f"{self._path} cannot be run by OpenVINO: {reason_of(error)}; export it again"
            ) from error
        compiled = self._graphs[0].compiled
        self._threads: int = compiled.get_property("INFERENCE_NUM_THREADS")
        if len(self._graphs) > 1:
            for compiled_graph, its_sizes in zip(
                self._graphs, sizes(self.min_rows, self._threads), strict=True
            ):
                compiled_graph.sizes = its_sizes
        self.vocab_size = compiled.output("logits").partial_shape[-1].get_length()
        self._bound: dict[str, tuple[Any, Any]] = {}
        self._pool = self._make_cache(settings)
        for compiled_graph in self._graphs:
            self._bind(compiled_graph)
        self._max_rows = None if rows_are_invariant() else MOST_ROWS
        if weights > _PACKED_AT_ONCE_BYTES:
            settings.say(f"packing the weights of {folder.name} for this processor")
            self._pack()

    def open(self) -> PrefillTable:
        return PrefillTable(self._pool, self.context_length)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences in one call; see `Engine.step`."""
        tables = self._reserve(work)
        blocks = [block for _, block in work]
        call = [(table, block, table.length) for table, block in zip(tables, blocks, strict=True)]
        if self._max_rows and sum(len(block.tokens) for block in blocks) > self._max_rows:
            return self._run_parts(call, self._max_rows)
        for table, block, _ in call:
            table.ran(block)
        graph, seconds = self._run(call)
        logits = graph.output("logits")
        per_block = []
        at = 0
        for block in blocks:
            per_block.append(logits[at : at + block.rows])
            at += block.rows
        return StepResult(per_block, [{} for _ in call], seconds)

    def _pack(self) -> None:
        """Let OpenVINO pack the weights, which it does in first calls.

        Without AVX-512, some products of eight rows take another form of them than those of two.
        """
        with closing(self.open()) as sequence:
            for count in (2, 8):
                if count <= min(self.context_length, self.free_slots):
                    self.step([(sequence, Block([0] * count, count))])

    def _run_parts(self, call: Sequence[Placed], max_rows: int) -> StepResult:
        """Run a step in calls of at most `max_rows` rows; its arrays are copies."""
        logits: list[list[Any]] = [[] for _ in call]
        seconds = 0.0
        for table, block, _ in call:
            table.ran(block)
        for part in parts_of(call, max_rows):
            graph, run_seconds = self._run([placed for _, placed in part])
            seconds += run_seconds
            part_logits, at = graph.output("logits"), 0
            for number, (_, block, _) in part:
                logits[number].append(part_logits[at : at + block.rows].copy())
                at += block.rows
        return StepResult(
            [np.concatenate(block_logits) for block_logits in logits], [{} for _ in call], seconds
        )

    def describe(self) -> dict[str, str]:
        """Everything that costs and exactness depend on; recorded results hold these strings."""
        return {
            "engine": self.name,
            "openvino": openvino().get_version(),
            "device": core().get_property("CPU", "FULL_DEVICE_NAME"),
            "threads": str(self._threads),
            "min_rows": str(self.min_rows),
            "kv_cache": _KV_PRECISION,
            "lanes": "|".join(
                ",".join(map(str, graph.sizes)) for graph in self._graphs if graph.sizes
            ),
            "attention": _ATTENTION,
            **({"most_rows": str(self._max_rows)} if self._max_rows else {}),
        }

    def _run(self, call: Sequence[Placed]) -> tuple[CompiledGraph, float]:
        """Run blocks; returns the graph with the outputs, and seconds."""
        graph, min_rows = self._choose_graph([block for _, block, _ in call])
        batch = CallInputs(min_rows, threads=self._threads, spare=self._pool.spare)
        for table, block, past in call:
            batch.add(table, block, past)
        return graph, graph.run(batch.inputs())

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
            self._graphs.append(CompiledGraph(paged_model(self._path), self._options))
            self._bind(self._graphs[-1])
        return graph_of_batch(self._graphs, blocks, self.min_rows)

    def _make_cache(self, settings: EngineSettings) -> BlockPool:
        """Make zeroed key and value tensors; returns the pool of their KV blocks."""
        ports = self._graphs[0].caches()
        shapes = {
            port.any_name: [dimension.get_length() for dimension in list(port.partial_shape)[1:]]
            for port in ports
        }
        dtype = np.dtype(ports[0].get_element_type().to_dtype())
        block_size = min(shape[1] for shape in shapes.values())  # 8-bit keys: scales beside slots
        block_bytes = sum(map(prod, shapes.values())) * dtype.itemsize
        tokens = settings.slots(self.context_length, block_bytes // block_size)
        blocks = -(-tokens // block_size)
        try:
            self._make_tensors(shapes, blocks + 1, dtype)  # and the spare block
        except (MemoryError, ValueError) as error:  # ValueError: beyond any address
            raise ModelError(
                f"no memory for a cache of {tokens} tokens of {self._path.parent.name} "
                f"({blocks * block_bytes / 2**30:.1f} GiB); set cache_tokens lower"
            ) from error
        return BlockPool(blocks, block_size)

    def _make_tensors(
        self, shapes: Mapping[str, Sequence[int]], blocks: int, dtype: npt.DTypeLike
    ) -> None:
        for name, shape in shapes.items():
            # The system allocates zeroed pages on first write, so unused blocks cost nothing.
            # And a NaN in a masked slot would reach the sums.
            zeros = np.zeros([blocks, *shape], dtype)
            # OpenVINO holds no reference to these arrays and tensors: the engine must.
            self._bound[name] = zeros, openvino().Tensor(zeros, shared_memory=True)

    def _bind(self, graph: CompiledGraph) -> None:
        for name, (_, tensor) in self._bound.items():
            graph.bind(name, tensor)


def _copies(weights_bytes: int) -> int:
    """Number of compiled graphs: one for all calls, or `_COPIES` where these take little."""
    fits = 2 * _COPIES * weights_bytes <= _MAX_COPIED_SHARE * memory_bytes()
    return _COPIES if fits and weights_bytes <= _PACKED_AT_ONCE_BYTES else 1
