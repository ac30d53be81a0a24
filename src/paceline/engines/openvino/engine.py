"""Runs a PagedAttention model through OpenVINO, with keys and values in tensors of our own.

Rows do not depend on how they are computed because every sequence gets at least two rows in a call
(one row takes another kernel) and keys and values are f16 (8-bit caches share a scale between
neighbouring slots, rejected ones included). Both were measured, and `engines/measure.py` measures
again on each machine.

Nothing is made inside the loop: a step copies numbers into tensors that are bound already. Rows
that only fill up a call are written to a cache block that belongs to nobody.
"""

from collections.abc import Sequence as Ordered
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.types import Block, Taps, tap_name
from paceline.engines.base import EngineSettings, Sequence, StepResult
from paceline.engines.openvino.graph import WANTED_ROWS, paged_model
from paceline.engines.openvino.lane import Lane
from paceline.engines.slots import BlockPool, BlockTable, reserve_all
from paceline.errors import ModelError

_PADDING = 0
"""Token of a padding row: any will do, its slot is overwritten before it is ever seen."""

_MOST_COPIED_BYTES = 1 << 30
"""Weights up to which the graph is compiled three times; a larger model's calls take so long that
preparing one again hardly shows."""

_DEFAULT_CACHE_BYTES = 2 << 30
"""Keys and values a model gets at most when the caller does not say."""


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
        model = paged_model(graph, settings.taps)
        sizes = _sizes(graph, self.min_rows)
        with ThreadPoolExecutor() as threads:
            self._lanes = list(threads.map(lambda each: Lane(model, options, each), sizes))
        compiled = self._lanes[0].compiled
        self._threads = compiled.get_property("INFERENCE_NUM_THREADS")
        self.taps = settings.taps
        self.vocab_size = compiled.output("logits").partial_shape[-1].get_length()
        self._pool = self._make_cache(settings.cache_tokens, graph)

    @property
    def free_slots(self) -> int:
        """Slots that no sequence holds."""
        return self._pool.free * self._pool.block_size

    @property
    def block_size(self) -> int:
        """Slots come in blocks of so many."""
        return self._pool.block_size

    def open(self) -> BlockTable:
        """A new, empty sequence."""
        return BlockTable(self._pool, self.context_length)

    def step(self, work: Ordered[tuple[Sequence, Block]]) -> StepResult:
        """Run blocks of different sequences in one call; see `Engine.step`."""
        tables = [_table(sequence) for sequence, _ in work]
        reserve_all(
            [(table, len(block.tokens)) for table, (_, block) in zip(tables, work, strict=True)]
        )
        lane, least = self._lane(work)
        ids: list[int] = []
        positions: list[int] = []
        begins = [0]
        wanted: list[int] = []
        blocks: list[int] = []
        block_begins = [0]
        for table, (_, block) in zip(tables, work, strict=True):
            rows = max(len(block.tokens), least)
            ids += block.tokens
            ids += [_PADDING] * (rows - len(block.tokens))
            positions += range(table.length, table.length + rows)
            last = begins[-1] + len(block.tokens)
            wanted += range(last - block.rows, last)
            begins.append(begins[-1] + rows)
            blocks += table.blocks(rows)
            block_begins.append(len(blocks))
        seconds = lane.run(
            {
                "input_ids": ids,
                "position_ids": positions,
                "past_lens": [table.length for table in tables],
                "subsequence_begins": begins,
                "block_indices": blocks,
                "block_indices_begins": block_begins,
                "max_context_len": max(positions) + 1,
                # As many as the lane has rows, so that the head, too, always gets the same number;
                # and never one, which takes another kernel and a slow one.
                WANTED_ROWS: wanted + [0] * (least - len(wanted)),
            }
        )
        logits = lane.output("logits")
        per_block = []
        at = 0
        for _, block in work:
            per_block.append(logits[at : at + block.rows])
            at += block.rows
        return StepResult(per_block, self._tapped(lane, begins, work), seconds)

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
            "lanes": "|".join(",".join(map(str, lane.sizes)) for lane in self._lanes),
            "taps": ",".join(map(str, self.taps)),
        }

    def _lane(self, work: Ordered[tuple[Sequence, Block]]) -> tuple[Lane, int]:
        """The copy of the graph to run, and the rows that a sequence gets at least."""
        if len(work) == 1:
            rows = len(work[0][1].tokens)
            for lane in self._lanes:
                for size in lane.sizes:
                    if rows <= size:
                        return lane, size
        return self._lanes[-1], self.min_rows

    def _tapped(
        self, lane: Lane, begins: list[int], work: Ordered[tuple[Sequence, Block]]
    ) -> list[Taps]:
        names = [tap_name(tap) for tap in self.taps]
        whole = {name: lane.output(name) for name in names}
        return [
            {name: rows[begin : begin + len(block.tokens)] for name, rows in whole.items()}
            for begin, (_, block) in zip(begins, work, strict=False)
        ]

    def _make_cache(self, tokens: int | None, graph: Path) -> BlockPool:
        """Bind zeroed key and value tensors to all lanes; returns the pool of their blocks."""
        import openvino as ov

        ports = self._lanes[0].caches
        shapes = [
            [dimension.get_length() for dimension in list(port.partial_shape)[1:]] for port in ports
        ]
        block_size = shapes[0][1]
        block_bytes = sum(int(np.prod(shape)) for shape in shapes) * 2
        if tokens is None:
            tokens = min(self.context_length, _DEFAULT_CACHE_BYTES // block_bytes * block_size)
        blocks = -(-tokens // block_size)
        # OpenVINO does not keep arrays and tensors alive that it was handed: the engine must.
        self._cache: list[Any] = []
        try:
            for port, shape in zip(ports, shapes, strict=True):
                # Zeroed memory is handed out lazily, so unused slots cost nothing; and it holds no
                # NaN that a masked slot could let through.
                zeros = np.zeros([blocks + 1, *shape], dtype=np.float16)  # the spare one too
                tensor = ov.Tensor(zeros, shared_memory=True)
                self._cache += [zeros, tensor]
                for lane in self._lanes:
                    lane.bind(port.any_name, tensor)
        except (MemoryError, ValueError) as error:  # ValueError: beyond any address
            raise ModelError(
                f"no memory for a cache of {tokens} tokens of {graph.parent.name} "
                f"({blocks * block_bytes / 2**30:.1f} GiB); set cache_tokens lower"
            ) from error
        return BlockPool(blocks, block_size)


def _table(sequence: Sequence) -> BlockTable:
    if not isinstance(sequence, BlockTable):
        raise TypeError(f"a {type(sequence).__name__} is not a sequence of this engine")
    return sequence


def _sizes(graph: Path, min_rows: int) -> list[tuple[int, ...]]:
    """The numbers of rows of each lane; one lane for all where copies would take much memory."""
    weights = graph.with_suffix(".bin")
    if weights.exists() and weights.stat().st_size > _MOST_COPIED_BYTES:
        return [()]
    return [(min_rows,), (8,), (16, 32)]
