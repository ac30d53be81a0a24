"""Which compiled graph runs a call: preparing one for another number of rows takes time."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.decoding.types import Block
from paceline.engines import EngineSettings
from paceline.engines.openvino import OpenVinoEngine
from paceline.engines.openvino.batch import graph_of_batch
from paceline.models import ModelFiles


def ran(*rows: int) -> list[Any]:
    """Graphs that ran calls of these numbers of rows, the first one longest ago."""
    return [SimpleNamespace(rows=count, last_run=float(time)) for time, count in enumerate(rows)]


def decodes(*rows: int) -> list[Block]:
    return [Block([5] * count, count) for count in rows]


def test_a_batch_is_padded_to_the_nearest_rows_that_a_graph_is_prepared_for():
    graphs = ran(8, 40, 36, 33)
    assert graph_of_batch(graphs, decodes(*[1] * 31, 3), 2) == (graphs[2], 36)
    assert graph_of_batch(graphs, decodes(*[1] * 33), 2) == (graphs[3], 33)


def test_a_batch_of_other_rows_runs_unpadded_in_the_graph_that_ran_longest_ago():
    graphs = ran(8, 40, 36, 33)
    assert graph_of_batch(graphs, decodes(1, 2), 2) == (graphs[0], 2)
    assert graph_of_batch(graphs, decodes(*[2] * 22), 2) == (graphs[0], 2)


def test_prefills_of_a_batch_leave_decodes_their_graphs():
    graphs = ran(33, 8, 40, 36)
    prefill = Block([5] * 30, 0, prefill=True)
    assert graph_of_batch(graphs, [*decodes(1, 1), prefill], 2) == (graphs[-1], 2)


def test_decode_rows_of_batches_have_the_bits_of_one_sequence_in_few_prepared_graphs(
    tiny_files: ModelFiles,
):
    length, drawn = tiny_files.context_length, random.Random(3)
    engine = OpenVinoEngine(tiny_files.path, length, EngineSettings(cache_tokens=8 * length))
    sequences = [engine.open() for _ in range(6)]
    for number, sequence in enumerate(sequences):
        prompt = [(7 * number + 3 * at) % 60 for at in range(9 + number)]
        engine.step([(sequence, Block(prompt, 1, prefill=True))])
        sequence.commit(len(prompt))
    works, batches, prepared = [], [], 0
    for _ in range(60):
        counts = [drawn.randint(1, 5) for _ in sequences[: drawn.randint(2, 6)]]
        blocks = [Block([drawn.randrange(60) for _ in range(count)], count) for count in counts]
        works.append(list(zip(sequences, blocks, strict=False)))
        rows = [graph.rows for graph in engine._graphs]
        batches.append([logits.copy() for logits in engine.step(works[-1]).logits])
        prepared += [graph.rows for graph in engine._graphs] != rows
    assert prepared < 20
    for work, batch in zip(works, batches, strict=True):
        for placed, logits in zip(work, batch, strict=True):
            assert np.array_equal(logits, engine.step([placed]).logits[0])
