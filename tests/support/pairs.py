"""All-pairs coverage: far fewer cases than a product, and any two values still meet."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest


def pairs(*axes: Sequence[Hashable]) -> list[tuple[Any, ...]]:
    """Rows of one value per axis: any two values of different axes are in a row together.

    A covering array of strength two, greedy and always the same:

        pairs("ab", "xy", (1, 2))     a x 2    a y 1    b x 1    b y 2     4 rows of the 8
    """
    # In order, so that every row begins with the first pair that is in none yet.
    missing = dict.fromkeys(
        ((i, one), (j, other))
        for i, j in combinations(range(len(axes)), 2)
        for one, other in product(axes[i], axes[j])
    )
    draw, rows = Random(1), []
    while missing:
        begun = dict(next(iter(missing)))
        drawn = [
            tuple(begun.get(at, draw.choice(axis)) for at, axis in enumerate(axes))
            for _ in range(60)
        ]
        best = max(drawn, key=lambda row: len(_pairs(row) & missing.keys()))
        rows.append(best)
        for pair in _pairs(best):
            missing.pop(pair, None)
    return rows


def _pairs(row: Sequence[Hashable]) -> set[Any]:
    return {*combinations(enumerate(row), 2)}


def covering(rows: Sequence[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Return a subset of the rows with every pair of values that occurs in a row."""
    pairs_of = {row: _pairs(row) for row in rows}
    missing = set[Any]().union(*pairs_of.values())
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs_of[row] & missing))
        chosen.add(best)
        missing -= pairs_of[best]
    return chosen


def is_toy(item: pytest.Function) -> bool:
    return str(item.callspec.params.get("engine", "")).startswith("toy")


def outside_pairs(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests with the marker `pairs` that a covering array of their function can do without.

    Those of a toy engine are all kept: its calls take microseconds.
    """
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairs") and isinstance(item, pytest.Function):
            functions[item.path, item.function].append(item)
    outside: list[pytest.Item] = []
    for function_items in functions.values():
        rows = {
            item: tuple(map(repr, item.callspec.params.values()))  # a dict has no hash
            for item in function_items
            if not is_toy(item)
        }
        chosen = covering([*rows.values()])
        outside += [item for item, row in rows.items() if row not in chosen]
    return outside
