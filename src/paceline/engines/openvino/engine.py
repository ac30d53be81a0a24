"""Runs a PagedAttention model through OpenVINO, with keys and values in tensors of our own.

Rows do not depend on how they are computed because attention gets an answer's one by one and a
prompt's at least by twos, because the layers get at least two in all (one takes another kernel),
and because keys and values are f16 (8-bit caches share a scale between neighbouring slots, rejected
ones included). All were measured, and `engines/profile.py` measures again on each machine.

Nothing is made inside the loop: a step copies numbers into tensors that are bound already.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.types import Block, Taps, tap_name
from paceline.engines.base import EngineSettings, KVSequence, StepResult
from paceline.engines.kv_blocks import BlockPool, reserve_all
from paceline.engines.openvino.batch import Batch, attended, is_deterministic
from paceline.engines.openvino.compiled_graph import CompiledGraph
from paceline.engines.openvino.graph import paged_model
from paceline.engines.openvino.kv_sequence import OpenVinoSequence
from paceline.errors import ModelError

_MOST_COPIED_BYTES = 1 << 30
"""Weights up to which the graph is compiled three times; a larger model's calls take so long that
preparing one again hardly shows."""


_ATTENTION = "an answer's rows one by one"
"""How rows are computed. Whoever changes the bits of a row or what a call costs changes these
words, too: measurements kept on a machine are then made again, and so must be the results in
`benchmarks/results` (`tests/test_records.py`)."""


class OpenVinoEngine:
    """The engine; see the top of this file. One at a time may call `step`."""

    name = "openvino"

    def __init__(
        self, graph: Path, context_length: int, settings: EngineSettings | None = None
    ) -> None:
        """Compile a model.

        Args:
            graph: the `openvino_model.xml` of a stateful language model.
            context_length: the most slots a sequence may have, as the model was trained.
            settings: see `EngineSettings`.

        Raises:
            ModelError: the file is not such a model, or there is no memory for its cache.
        """
        settings = settings or EngineSettings()
        self.min_rows = settings.min_rows
        self.context_length = context_length
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": "f16",
            # Left to itself a CPU with bf16 would use it: no faster here, and less precise.
            "INFERENCE_PRECISION_HINT": "f32",
            # Activations meet 8-bit weights as 8 bits, a scale for each 32: twice as fast from
            # 6 rows on (docs/decisions/openvino-from-python.md).
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32",
        }
        if settings.threads is not None:
            options["INFERENCE_NUM_THREADS"] = str(settings.threads)
        self._open_lane = partial(_open_lane, graph, settings.taps, options)
        model = paged_model(graph, settings.taps)
        with ThreadPoolExecutor() as pool:
            opened = [pool.submit(CompiledGraph, model, options) for _ in range(_copies(graph))]
            self._lanes = [lane.result() for lane in opened]
        compiled = self._lanes[0].compiled
        self._threads: int = compiled.get_property("INFERENCE_NUM_THREADS")
        if len(self._lanes) > 1:
            for lane, sizes in zip(self._lanes, _sizes(self.min_rows, self._threads), strict=True):
                lane.sizes = sizes
        self.taps = settings.taps
        self.vocab_size = compiled.output("logits").partial_shape[-1].get_length()
        self._pool = self._make_cache(settings, graph)

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

    def open(self) -> OpenVinoSequence:
        """A new, empty sequence."""
        return OpenVinoSequence(self._pool, self.context_length)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences in one call; see `Engine.step`."""
        tables = [_table(sequence) for sequence, _ in work]
        reserve_all(
            [(table, len(block.tokens)) for table, (_, block) in zip(tables, work, strict=True)]
        )
        lane, least = self._lane(work)
        call = Batch(least, threads=self._threads, spare=self._pool.spare)
        for table, (_, block) in zip(tables, work, strict=True):
            table.run(block)
            call.add(table, block)
        seconds = lane.run(call.inputs())
        logits = lane.output("logits")
        per_block = []
        at = 0
        for _, block in work:
            per_block.append(logits[at : at + block.rows])
            at += block.rows
        return StepResult(per_block, self._tapped(lane, call.places, work), seconds)

    def describe(self) -> dict[str, str]:
        """What costs and exactness depend on."""
        import openvino as ov

        return {
            "engine": self.name,
            "openvino": ov.get_version(),
            "device": ov.Core().get_property("CPU", "FULL_DEVICE_NAME"),
            "threads": str(self._threads),
            "min_rows": str(self.min_rows),
            "kv_cache": "f16",
            "lanes": "|".join(",".join(map(str, lane.sizes)) for lane in self._lanes if lane.sizes),
            "attention": _ATTENTION,
            "taps": ",".join(map(str, self.taps)),
        }

    def _lane(self, work: Sequence[tuple[KVSequence, Block]]) -> tuple[CompiledGraph, int]:
        """The copy of the graph to run, and the rows that the call gets at least.

        That for several sequences is made when it is first needed: it takes as much as the others.
        """
        if len(work) == 1:
            block = work[0][1]
            rows = attended(block, self.min_rows)
            for lane in self._lanes:
                for size in lane.sizes:
                    # A block that needs more rows only for its kernel takes the next size.
                    if rows <= size and (
                        block.prefill
                        or size == 1
                        or is_deterministic(rows, size - rows, self._threads)
                    ):
                        return lane, size
        elif self._lanes[-1].sizes:
            self._lanes.append(self._open_lane())
            self._bind(self._lanes[-1])
        return self._lanes[-1], self.min_rows

    def _tapped(
        self, lane: CompiledGraph, places: list[int], work: Sequence[tuple[KVSequence, Block]]
    ) -> list[Taps]:
        names = [tap_name(tap) for tap in self.taps]
        whole = {name: lane.output(name) for name in names}
        return [
            {name: rows[place : place + len(block.tokens)] for name, rows in whole.items()}
            for place, (_, block) in zip(places, work, strict=True)
        ]

    def _make_cache(self, settings: EngineSettings, graph: Path) -> BlockPool:
        """Bind zeroed key and value tensors to all lanes; returns the pool of their blocks."""
        import openvino as ov

        ports = self._lanes[0].caches
        shapes = [
            [dimension.get_length() for dimension in list(port.partial_shape)[1:]] for port in ports
        ]
        block_size = shapes[0][1]
        block_bytes = sum(int(np.prod(shape)) for shape in shapes) * 2
        tokens = settings.slots(self.context_length, block_bytes // block_size)
        blocks = -(-tokens // block_size)
        # OpenVINO does not keep arrays and tensors alive that it was handed: the engine must.
        self._cache: dict[str, tuple[Any, Any]] = {}
        try:
            for port, shape in zip(ports, shapes, strict=True):
                # Zeroed memory is handed out lazily, so unused slots cost nothing; and it holds no
                # NaN that a masked slot could let through.
                zeros = np.zeros([blocks + 1, *shape], dtype=np.float16)  # the spare one too
                tensor = ov.Tensor(zeros, shared_memory=True)
                self._cache[port.any_name] = zeros, tensor
            for lane in self._lanes:
                self._bind(lane)
        except (MemoryError, ValueError) as error:  # ValueError: beyond any address
            raise ModelError(
                f"no memory for a cache of {tokens} tokens of {graph.parent.name} "
                f"({blocks * block_bytes / 2**30:.1f} GiB); set cache_tokens lower"
            ) from error
        return BlockPool(blocks, block_size)

    def _bind(self, lane: CompiledGraph) -> None:
        for name, (_, tensor) in self._cache.items():
            lane.bind(name, tensor)


def _open_lane(graph: Path, taps: Sequence[int], options: Mapping[str, str]) -> CompiledGraph:
    """A copy of the graph for calls of any number of rows of any number of sequences."""
    return CompiledGraph(paged_model(graph, taps), options)


def _table(sequence: KVSequence) -> OpenVinoSequence:
    if not isinstance(sequence, OpenVinoSequence):
        raise TypeError(f"a {type(sequence).__name__} is not a sequence of this engine")
    return sequence


def _copies(graph: Path) -> int:
    """How many lanes there are: one for all calls where copies would take much memory."""
    weights = graph.with_suffix(".bin")
    return 1 if weights.exists() and weights.stat().st_size > _MOST_COPIED_BYTES else 3


def _sizes(min_rows: int, threads: int) -> list[tuple[int, ...]]:
    """The numbers of rows of each lane for a sequence alone."""
    plain = min_rows if threads <= min_rows or min_rows == 1 else min_rows + 2
    return [(plain,), (8,), (16, 32)]
