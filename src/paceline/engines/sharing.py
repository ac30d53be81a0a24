"""What sequences and rows add to a call of several, measured: one line for all such calls.

A sequence alone has copies of the graph for the usual numbers of rows, and its costs go up in
steps. A call of several has any number of rows, so there each row costs something.
"""

from itertools import product
from time import perf_counter

import numpy as np

from paceline.decoding.costs import CostTable, SharedCost
from paceline.decoding.types import Block
from paceline.engines.base import Engine

_SEQUENCES = (2, 6)
_ROWS = (1, 4)
_CONTEXT = 256
_ROUNDS = 5
_SECONDS = 1.0


def shared_cost(engine: Engine, alone: CostTable) -> SharedCost:
    """Time calls of a few sequences with a few rows each, in turns, and fit a line.

    Args:
        engine: nobody else may use it meanwhile.
        alone: what a sequence alone costs; all there is to go by where there is no room for more.
    """
    most = max(_SEQUENCES)
    context = min(_CONTEXT, engine.context_length - max(_ROWS) - engine.min_rows)
    if context < 1 or engine.free_slots < context + (most + 1) * engine.block_size:
        return SharedCost(max(alone(1) - alone.row, 0.0), 0.0, alone.row)
    first = engine.open()
    sequences = [first]
    try:
        engine.step([(first, Block([0] * context, 0))])
        first.commit(context)
        sequences += [first.fork(context) for _ in range(most - 1)]
        shapes = list(product(_SEQUENCES, _ROWS))
        times: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
        started = perf_counter()
        # What comes first may be made for it, and is not counted.
        engine.step([(each, Block([0], 1)) for each in sequences])
        for _ in range(_ROUNDS):
            for count, rows in shapes:
                block = Block([0] * rows, rows)
                result = engine.step([(each, block) for each in sequences[:count]])
                times[count, rows].append(result.seconds)
            if perf_counter() - started > _SECONDS:
                break
    finally:
        for each in sequences:
            each.close()
    line = [[1, count, count * rows] for count, rows in shapes]
    # Other work on the machine only ever adds time.
    found, *_ = np.linalg.lstsq(
        np.array(line, float), np.array([min(times[shape]) for shape in shapes]), rcond=None
    )
    call, sequence, row = (max(float(seconds), 0.0) for seconds in found)
    return SharedCost(call, sequence, row or alone.row)
