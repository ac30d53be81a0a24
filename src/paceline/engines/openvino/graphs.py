"""The compiled graph that runs a call: one prepared for its number of rows, if there is one.

OpenVINO prepares a graph again for every change in the number of rows: 5 to 13 ms for 30 layers in
one thread, as long as two rows of one sequence take, or 15 more rows of a batch. So small models
have several compiled copies. Blocks of one sequence are padded to a few sizes, each with its copy.
A batch may have any number of rows, and takes a copy that has run nearly as many:

    copies that ran     8, 33, 36 and 40 rows
    a batch of 34 rows  runs in the copy for 36, with two rows of padding
    one of 44 rows      fits none: the copy that ran longest ago is prepared for 44
"""

from collections.abc import Sequence

from paceline.decoding.types import Block
from paceline.engines.openvino.batch import CompiledGraph, is_deterministic, padded_rows

_MOST_PADDING = 4
"""Most rows of padding in a batch: with 2 to 32 requests, 0 and 8 take more time (2026-11-26)."""


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
    prepared = [graph for graph in graphs if rows <= graph.rows <= rows + _MOST_PADDING]
    if prepared:
        graph = min(prepared, key=lambda graph: graph.rows)
        return graph, max(graph.rows, min_rows)
    return min(graphs, key=lambda graph: graph.last_run), min_rows
