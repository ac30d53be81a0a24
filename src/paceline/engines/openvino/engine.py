"""Runs a PagedAttention model through OpenVINO, with keys and values in tensors of our own.

Rows do not depend on how they are computed because every sequence gets at least two rows in a call
(one row takes another kernel) and keys and values are f16 (8-bit caches share a scale between
neighbouring slots, rejected ones included). Both were measured, and `engines/measure.py` measures
again on each machine.

Nothing is made inside the loop: one tensor per input, bound once; a step only sets shapes and
copies numbers.
"""

from collections.abc import Sequence as Ordered
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from paceline.decoding.types import Block, Taps
from paceline.engines.base import EngineSettings, Sequence, StepResult
from paceline.engines.openvino.graph import TAP_PREFIX, WANTED_ROWS, paged_model
from paceline.engines.slots import BlockPool, BlockTable, Wanted, reserve_all
from paceline.errors import ModelError

_PADDING = 0
"""Token of a padding row: any will do, its slot is overwritten before it is ever seen."""

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
        import openvino as ov

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
        compiled = ov.Core().compile_model(model, "CPU", options)
        self._threads = compiled.get_property("INFERENCE_NUM_THREADS")
        self._request = compiled.create_infer_request()
        self._taps = tuple(f"{TAP_PREFIX}{tap}" for tap in settings.taps)
        self.vocab_size = compiled.output("logits").partial_shape[-1].get_length()
        self._pool = self._make_cache(compiled, settings.cache_tokens, graph)
        self._inputs = {
            port.any_name: _Input(self._request, port)
            for port in compiled.inputs
            if not port.any_name.startswith(("key_cache.", "value_cache."))
        }

    @property
    def free_slots(self) -> int:
        """Slots that no sequence holds."""
        return self._pool.free * self._pool.block_size

    def open(self) -> BlockTable:
        """A new, empty sequence."""
        return BlockTable(self._pool, self.context_length)

    def step(self, work: Ordered[tuple[Sequence, Block]]) -> StepResult:
        """Run blocks of different sequences in one call; see `Engine.step`."""
        call = [self._wanted(sequence, block) for sequence, block in work]
        reserve_all(call)
        ids: list[int] = []
        begins = [0]
        wanted: list[int] = []
        for (_, block), (_, rows, padding) in zip(work, call, strict=True):
            ids += block.tokens
            ids += [_PADDING] * padding
            last = begins[-1] + rows
            wanted += range(last - block.rows, last)
            begins.append(last + padding)
        positions: list[int] = []
        blocks: list[int] = []
        block_begins = [0]
        for table, rows, padding in call:
            positions += range(table.length, table.length + rows + padding)
            blocks += table.blocks(rows + padding)
            block_begins.append(len(blocks))
        self._inputs["input_ids"].write(ids)
        self._inputs["position_ids"].write(positions)
        self._inputs["past_lens"].write([table.length for table, _, _ in call])
        self._inputs["subsequence_begins"].write(begins)
        self._inputs["block_indices"].write(blocks)
        self._inputs["block_indices_begins"].write(block_begins)
        self._inputs["max_context_len"].write(max(positions) + 1)
        # A call in which nobody wants a row still computes one: the graph needs at least that.
        self._inputs[WANTED_ROWS].write(wanted or [0])

        started = perf_counter()
        self._request.infer(share_outputs=True)
        seconds = perf_counter() - started

        logits = self._output("logits")
        per_block = []
        at = 0
        for _, block in work:
            per_block.append(logits[at : at + block.rows])
            at += block.rows
        return StepResult(per_block, self._tapped(begins, work), seconds)

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
            "taps": ",".join(self._taps),
        }

    def _wanted(self, sequence: Sequence, block: Block) -> Wanted:
        if not isinstance(sequence, BlockTable):
            raise TypeError(f"a {type(sequence).__name__} is not a sequence of this engine")
        rows = len(block.tokens)
        return Wanted(sequence, rows, padding=max(self.min_rows - rows, 0))

    def _tapped(self, begins: list[int], work: Ordered[tuple[Sequence, Block]]) -> list[Taps]:
        whole = {name: self._output(name) for name in self._taps}
        return [
            {name: rows[begin : begin + len(block.tokens)] for name, rows in whole.items()}
            for begin, (_, block) in zip(begins, work, strict=False)
        ]

    def _output(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """An output as [rows, width] float32, a view."""
        array: np.ndarray[Any, np.dtype[np.float32]] = self._request.get_tensor(name).data
        return array.reshape(-1, array.shape[-1])

    def _make_cache(self, compiled: Any, tokens: int | None, graph: Path) -> BlockPool:
        """Bind zeroed key and value tensors; returns the pool of their blocks."""
        import openvino as ov

        ports = [
            port
            for port in compiled.inputs
            if port.any_name.startswith(("key_cache.", "value_cache."))
        ]
        shapes = [
            [dimension.get_length() for dimension in list(port.partial_shape)[1:]] for port in ports
        ]
        block_size = shapes[0][1]
        block_bytes = sum(int(np.prod(shape)) for shape in shapes) * 2
        if tokens is None:
            tokens = min(self.context_length, _DEFAULT_CACHE_BYTES // block_bytes * block_size)
        # A block more than the slots asked for: padding and drafts reach past a full context.
        blocks = -(-tokens // block_size) + 1
        # OpenVINO does not keep arrays and tensors alive that it was handed: the engine must.
        self._cache: list[Any] = []
        try:
            for port, shape in zip(ports, shapes, strict=True):
                # Zeroed memory is handed out lazily, so unused slots cost nothing; and it holds no
                # NaN that a masked slot could let through.
                zeros = np.zeros([blocks, *shape], dtype=np.float16)
                tensor = ov.Tensor(zeros, shared_memory=True)
                self._request.set_tensor(port, tensor)
                self._cache += [zeros, tensor]
        except (MemoryError, ValueError) as error:  # ValueError: beyond any address
            raise ModelError(
                f"no memory for a cache of {tokens} tokens of {graph.parent.name} "
                f"({blocks * block_bytes / 2**30:.1f} GiB); set cache_tokens lower"
            ) from error
        return BlockPool(blocks, block_size)


class _Input:
    """One input's tensor, bound once; resized only when its shape changes."""

    def __init__(self, request: Any, port: Any) -> None:
        import openvino as ov

        self._tensor = ov.Tensor(port.element_type, ov.Shape([0] * len(port.partial_shape)))
        self._view = self._tensor.data
        self._size = 0
        request.set_tensor(port, self._tensor)

    def write(self, values: list[int] | int) -> None:
        """Copy the numbers in."""
        if isinstance(values, list) and len(values) != self._size:
            self._size = len(values)
            self._tensor.shape = [self._size]
            self._view = self._tensor.data
        self._view[...] = values
