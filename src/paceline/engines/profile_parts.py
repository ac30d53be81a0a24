"""Measures a cost profile in parts of a few calls: for large models, between answers.

The first part compares blocks, which `exact` rests on, and times every T once. A later part is
another round of times, or one more condition of `invariance.py`. Before the first part, a policy
gets `PRIOR`. Invariant: no part holds slots when it ends.
"""

from collections.abc import Collection
from contextlib import closing
from dataclasses import replace

import numpy as np

from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block
from paceline.engines.base import Engine
from paceline.engines.invariance import (
    BLOCK_LENGTH,
    CONDITIONS,
    Compared,
    compare,
    measure_invariance,
)
from paceline.engines.profile import CostProfile, is_whole

PRIOR = CostTable({1: 1.0, 32: 8.75})
"""Costs in calls of one row: a further row adds a quarter of it.

So 8 rows take 2.75 calls. OpenVINO's take 1.3 and 1.4 of a 0.6B and a 1.7B model, llama.cpp's 3.0
and 3.2 (benchmarks/results): what is expected to gain at these costs gains on most machines."""

_ROWS = (1, 2, 4, 8, 16)
_CONTEXT = 64


def measure_part(
    engine: Engine, profile: CostProfile | None, conditions: Collection[str] = ()
) -> CostProfile:
    """`profile` with one more part, those of `conditions` first; `profile` itself if it is whole.

    Raises CacheFull if there are no slots for it.
    """
    if profile is None or BLOCK_LENGTH not in profile.compared:
        return _round(engine, profile)
    missing = [name for name in CONDITIONS if name not in profile.compared]
    pending = [name for name in missing if name in conditions]
    timed = is_whole(replace(profile, compared=dict.fromkeys(CONDITIONS, _NONE)), engine)
    if timed and not pending:
        pending = missing
    if pending:
        compared = measure_invariance(engine, pending[:1])
        return replace(profile, compared={**profile.compared, **compared}) if compared else profile
    return profile if is_whole(profile, engine) else _round(engine, profile)


def without_times(profile: CostProfile) -> CostProfile:
    """A profile with what was compared, to be timed again."""
    return replace(profile, seconds={}, deep_seconds={}, deep_context=0, rounds=0)


_NONE = Compared()


def _round(engine: Engine, profile: CostProfile | None) -> CostProfile:
    """Time every T once more; the first time, compare the rows as well."""
    room = min(engine.context_length, engine.free_slots) - engine.min_rows
    rows = [count for count in _ROWS if count <= room // 2] or [1]
    longest = rows[-1]
    context = max(min(_CONTEXT, room - longest), 1)
    tokens = np.random.default_rng(2).integers(0, engine.vocab_size, context + longest).tolist()
    block, compared = tokens[context:], Compared()
    seconds: dict[int, float] = {}
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(tokens[:context], 0, prefill=True))])
        sequence.commit(context)
        # Not timed: an engine may prepare a graph in its first call.
        reference = engine.step([(sequence, Block(block, longest))]).logits[0].copy()
        for count in rows:
            step = engine.step([(sequence, Block(block[:count], count))])
            compared += compare(step.logits[0], reference[:count])
            seconds[count] = step.seconds
    if profile is not None:
        compared += profile.compared.get(BLOCK_LENGTH, Compared())
        if profile.rounds and profile.seconds.keys() == seconds.keys():
            seconds = {count: min(seconds[count], profile.seconds[count]) for count in seconds}
    return CostProfile(
        seconds,
        compared.holds,
        compared.largest_difference,
        context,
        compared={**(profile.compared if profile else {}), BLOCK_LENGTH: compared},
        rounds=(profile.rounds if profile else 0) + 1,
    )
