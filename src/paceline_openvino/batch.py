"""One batched call: its inputs, and the compiled graph that runs them.

PagedAttention gets a prompt chunk as one sequence and every decode row as its own, so the kernel
depends on the phase alone. Padding rows are a sequence of their own, in the spare KV block.
Three rows of a prompt after 4 tokens, with a decode block of two rows after 8:

    rows of the call     0 1 2 | 3 4
    attention            past_lens 4, 8, 9    subsequence_begins 0, 3, 4, 5

OpenVINO prepares a graph again for every change in the number of rows: 5 to 13 ms for 30 layers in
one thread, as long as two rows of one sequence take, or 15 more rows of a batch. So small models
have several compiled copies. Blocks of one sequence are padded to a few sizes, each with its copy.
A batch may have any number of rows, and takes a copy that has run nearly as many:

    copies that ran     8, 33, 36 and 40 rows
    a batch of 34 rows  runs in the copy for 36, with two rows of padding
    one of 44 rows      fits none: the copy that ran longest ago is prepared for 44
"""

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import BlockTable, PrefillTable
from paceline_openvino.graph import OUTPUT_ROWS
from paceline_openvino.library import core, openvino

KV_CACHES = ("key_cache.", "value_cache.")
"""Prefixes of the KV cache inputs, which are bound once; all others are written in every call."""

_MAX_PADDING = 4
"""Most rows of padding in a batch: 0 and 8 take more time, replayed with 2 to 32 requests
(2026-11-26)."""


class CompiledGraph:
    """A compiled graph. `run` allocates nothing: every input has one tensor, bound once."""

    sizes: tuple[int, ...] = ()
    """Bucket sizes in rows, ascending; empty: any number of rows."""
    rows = 0
    """Rows of its last call, for which it is prepared."""
    last_run = 0.0
    """When that began (`perf_counter`)."""

    def __init__(self, model: Any, options: Mapping[str, str]) -> None:
        """Compile `model` for the CPU."""
        self.compiled = core().compile_model(model, "CPU", dict(options))
        self._request = self.compiled.create_infer_request()
        self._inputs = {
            port.any_name: _Input(self._request, port)
            for port in self.compiled.inputs
            if not port.any_name.startswith(KV_CACHES)
        }

    def caches(self) -> list[Any]:
        return [port for port in self.compiled.inputs if port.any_name.startswith(KV_CACHES)]

    def bind(self, name: str, tensor: Any) -> None:
        """Bind `tensor` to an input; the caller keeps it alive."""
        self._request.set_tensor(name, tensor)

    def run(self, values: Mapping[str, list[int] | int]) -> float:
        """Run the graph; `values` has all its inputs but the caches. Returns seconds."""
        for name, tensor in self._inputs.items():
            tensor.write(values[name])
        self.rows = self._inputs["input_ids"].size
        self.last_run = started = perf_counter()
        self._request.infer(share_outputs=True)
        return perf_counter() - started

    def output(self, name: str) -> npt.NDArray[np.float32]:
        """An output of the last run as [rows, width] float32: a view, valid until the next."""
        array: npt.NDArray[np.float32] = self._request.get_tensor(name).data
        return array.reshape(-1, array.shape[-1])


class _Input:
    """One input's tensor, bound once, resized when the number of values changes."""

    def __init__(self, request: Any, port: Any) -> None:
        ov = openvino()
        self._tensor = ov.Tensor(port.element_type, ov.Shape([0] * len(port.partial_shape)))
        self._view = self._tensor.data
        self.size = 0
        request.set_tensor(port, self._tensor)

    def write(self, values: list[int] | int) -> None:
        if isinstance(values, list) and len(values) != self.size:
            self.size = len(values)
            self._tensor.shape = [self.size]
            self._view = self._tensor.data
        self._view[...] = values


_PADDING = 0
"""Token of a padding row; its logits are not read."""


class _Sequences:
    """The sequences of a call, as PagedAttention takes them."""

    def __init__(self) -> None:
        self.longest = 0
        self.mixed = False
        """Whether a sequence has several rows."""
        self._past: list[int] = []
        self._begins = [0]
        self._blocks: list[int] = []
        self._block_begins = [0]

    def __len__(self) -> int:
        return len(self._past)

    def add(self, past: int, rows: int, blocks: list[int]) -> None:
        self._past.append(past)
        self._begins.append(self._begins[-1] + rows)
        self._blocks += blocks
        self._block_begins.append(len(self._blocks))
        self.longest = max(self.longest, past + rows)
        self.mixed |= rows > 1

    def inputs(self) -> dict[str, list[int] | int]:
        return {
            "past_lens": self._past,
            "subsequence_begins": self._begins,
            "block_indices": self._blocks,
            "block_indices_begins": self._block_begins,
            "max_context_len": self.longest,
        }


class CallInputs:
    """The inputs of one call, built block by block."""

    def __init__(self, min_rows: int, *, threads: int, spare: int) -> None:
        """An empty batch.

        Args:
            min_rows: least rows of the call; with 1 a row's bits may depend on the number of rows.
            threads: threads of the engine.
            spare: number of the KV block for padding rows.
        """
        self.starts: list[int] = []
        """Per block, its first row in the call."""
        self._min_rows, self._threads, self._spare = min_rows, threads, spare
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._output_rows: list[int] = []
        self._sequences = _Sequences()

    def add(self, table: BlockTable, block: Block, past: int) -> None:
        """Add a block of a sequence to the call, after `past` slots."""
        count, at = len(block.tokens), len(self._ids)
        rows = padded_rows(block, self._min_rows)
        self.starts.append(at)
        self._ids += (*block.tokens, *[_PADDING] * (rows - count))
        self._positions += range(past, past + rows)
        self._output_rows += range(at + count - block.rows, at + count)
        if block.prefill:
            self._sequences.add(past, rows, table.blocks(rows, past))
            return
        for row in range(rows):
            self._sequences.add(past + row, 1, table.blocks(row + 1, past))

    def inputs(self) -> dict[str, list[int] | int]:
        """Inputs by name, for a PagedAttention graph. Call it once, after the last `add`."""
        sequences, missing = self._sequences, max(self._min_rows - len(self._ids), 0)
        if self._min_rows > 1 and not (
            sequences.mixed or is_deterministic(len(sequences), missing, self._threads)
        ):
            missing = 2
        if missing:
            self._ids += [_PADDING] * missing
            self._positions += range(missing)
            sequences.add(0, missing, [self._spare])
        return {
            "input_ids": self._ids,
            "position_ids": self._positions,
            **sequences.inputs(),
            # Padded to `min_rows`, so that the head always gets the same number of rows; and never
            # one, which takes another, slow kernel.
            OUTPUT_ROWS: self._output_rows + [0] * (self._min_rows - len(self._output_rows)),
        }


Placed = tuple[PrefillTable, Block, int]
"""A block of a sequence, and the slots before it."""


def parts_of(call: Sequence[Placed], max_rows: int) -> Iterator[list[tuple[int, Placed]]]:
    """A call in parts of at most `max_rows` rows, in order: (number of the block in `call`, piece).

    Prompts are cut anywhere; blocks of decode only if they are longer than a part, as where a
    preempted answer is computed again.
    """
    part: list[tuple[int, Placed]] = []
    room = max_rows
    for number, (table, block, past) in enumerate(call):
        length, at = len(block.tokens), 0
        while at < length:
            left = length - at
            whole = not block.prefill and left <= max_rows
            if part and room < (left if whole else 2):
                yield part
                part, room = [], max_rows
            count = left if whole else min(room, left)
            output_rows = max(0, min(count, at + count - (length - block.rows)))
            piece = block._replace(tokens=block.tokens[at : at + count], rows=output_rows)
            part.append((number, (table, piece, past + at)))
            at, room = at + count, room - max(count, 2)
    if part:
        yield part


def padded_rows(block: Block, min_rows: int) -> int:
    """Rows of a block with padding: a single prefill row would get the decode kernel."""
    return max(len(block.tokens), min(min_rows, 2)) if block.prefill else len(block.tokens)


def is_deterministic(rows: int, missing: int, threads: int) -> bool:
    """True if the kernel for `rows` decode rows and `missing` padding rows is deterministic.

    With fewer sequences than threads, all of one row, OpenVINO adds the partial sums of threads in
    the order in which the threads end (`exec_loop_bhl` in its executor_pa.cpp).
    """
    return missing > 1 or rows + missing >= threads


def sizes(min_rows: int, threads: int) -> list[tuple[int, ...]]:
    """Per copy, ascending: the numbers of rows to which it pads a block of one sequence."""
    plain = min_rows if threads <= min_rows or min_rows == 1 else min_rows + 2
    return [(plain,), (8,), (16, 32)]


def graph_of_block(
    graphs: Sequence[CompiledGraph], block: Block, min_rows: int, threads: int
) -> tuple[CompiledGraph, int]:
    """The graph for a call of one sequence, and the call's least number of rows."""
    rows = padded_rows(block, min_rows)
    for graph in graphs:
        for size in graph.sizes:
            # Where padding to `size` gives another kernel, the next size is taken.
            if rows <= size and (
                block.prefill or size == 1 or is_deterministic(rows, size - rows, threads)
            ):
                return graph, size
    return graphs[-1], min_rows


def graph_of_batch(
    graphs: Sequence[CompiledGraph], blocks: Sequence[Block], min_rows: int
) -> tuple[CompiledGraph, int]:
    """The graph for a call of several sequences, and the call's least number of rows.

    Calls with a prompt have the last graph: hardly two have the same number of rows.
    """
    if any(block.prefill for block in blocks):
        return graphs[-1], min_rows
    rows = sum(len(block.tokens) for block in blocks)
    prepared = [graph for graph in graphs if rows <= graph.rows <= rows + _MAX_PADDING]
    if prepared:
        graph = min(prepared, key=lambda graph: graph.rows)
        return graph, max(graph.rows, min_rows)
    return min(graphs, key=lambda graph: graph.last_run), min_rows
