"""Row invariance: rows do not depend on how they are computed, bit for bit.

The comparisons of `engines/exact.py` after more contexts and in more ways, and around numbers of
keys where attention may take another kernel.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from time import perf_counter

from paceline.engines.base import Engine
from paceline.engines.exact import BLOCK_LENGTH, Compared, Depth, compare_rows, room_for
from paceline.verify.checks import BLOCKS, DoneChecks, Verdict

_CONTEXTS = (16, 64, 300, 1000)
_ROWS = max(BLOCKS)
_DEPTH = Depth(_ROWS, (1, *BLOCKS), (2, 3, 16, 31, 64, 100, -1, -4), after=_ROWS)

_THRESHOLDS = (512, 1024, 2048, 4096, 8192)
"""Numbers of keys where attention may take another kernel."""

_BEFORE = 9
"""Rows before a threshold."""

_CROSSING = Depth(_ROWS, (2, 3, 5, 8, 16))


def check_rows(
    engine: Engine,
    verdict: Verdict,
    *,
    seconds: float = inf,
    watch: Callable[[int], None] = lambda _: None,
) -> DoneChecks:
    """Compare rows of the same positions, computed under every condition, bit for bit.

    Contexts of which two sequences do not fit into the free slots are left out. After `seconds` no
    further context is begun.
    """
    started = perf_counter()
    checks = row_checks(engine)
    done = 0
    for done, check in enumerate(checks, start=1):
        for name, compared in check().items():
            verdict.conditions[name] = verdict.conditions.get(name, Compared()) + compared
        watch(done)
        if perf_counter() - started > seconds:
            break
    return DoneChecks(done, len(checks), perf_counter() - started)


def row_checks(engine: Engine) -> list[Callable[[], dict[str, Compared]]]:
    """The comparisons at every context that fits, and around every threshold that does."""
    contexts = [at for at in _CONTEXTS if at + _ROWS <= room_for(engine, 2)]
    thresholds = [keys for keys in _THRESHOLDS if keys + _ROWS <= room_for(engine, 1)]
    return [
        *(partial(compare_rows, engine, at, _DEPTH) for at in contexts),
        *(
            partial(compare_rows, engine, keys - _BEFORE, _CROSSING, [BLOCK_LENGTH])
            for keys in thresholds
        ),
    ]
