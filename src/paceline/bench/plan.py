"""What speculation can bring on this machine, before anything is drafted.

The arithmetic is `decoding/costs.py`; here it is laid out for people.
"""

from collections.abc import Mapping
from typing import Any

from paceline.decoding.costs import CostTable, break_even, speed_up

ZAYA = {1: 0.112, 4: 0.499}
"""Seconds a call of the 8B soft-routed MoE model on the Apple Neural Engine, by rows, as its
authors measured them (the ZAYA experiment): four rows cost more than four calls."""

_CHANCES = (0.3, 0.5, 0.7, 0.9)


def plan(cost: CostTable) -> list[dict[str, Any]]:
    """For every measured T: cost, ratio to plain, break-even, and speed-up at some acceptances.

    `break_even` is the chance per draft token at which a block of T is as fast as plain decoding;
    None when even certainty does not pay. `speed_up` maps chances to tokens per second over
    plain's.
    """
    return [
        {
            "rows": rows,
            "milliseconds": cost(rows) * 1e3,
            "ratio": cost(rows) / cost(1),
            "break_even": break_even(cost, rows),
            "speed_up": {
                str(chance): speed_up(cost, [chance] * (rows - 1)) for chance in (*_CHANCES, 1.0)
            },
        }
        for rows in cost.seconds
        if rows > 1
    ]


def best(cost: CostTable, chance: float) -> tuple[int, float]:
    """The T (1: do not draft) with the best speed-up at this chance per draft token, and that."""
    options = {rows: speed_up(cost, [chance] * (rows - 1)) for rows in (1, *cost.seconds)}
    rows = max(options, key=lambda each: options[each])
    return rows, options[rows]


def best_by_chance(cost: CostTable) -> Mapping[float, tuple[int, float]]:
    """`best` for chances from poor to sure."""
    return {chance: best(cost, chance) for chance in (0.1, *_CHANCES, 1.0)}
