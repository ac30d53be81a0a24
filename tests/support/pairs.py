"""All-pairs coverage: far fewer cases than a product, and any two values still meet."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(*axes: Sequence[Hashable]) -> list[tuple[Any, ...]]:
    """Rows of one value per axis: any two values of different axes are in a row together.

    A covering array of strength two, greedy and always the same:

        pairs("ab", "xy", (1, 2))     a x 1    a y 2    b x 2    b y 1     4 rows of the 8
    """
    # In order, so that every row begins with the first pair that is in none yet.
    missing = dict.fromkeys(
        ((i, one), (j, other))
        for i, j in combinations(range(len(axes)), 2)
        for one, other in product(axes[i], axes[j])
    )
    uses = Counter[tuple[int, Hashable]]()
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in sorted(range(len(axes)), key=lambda axis: -len(axes[axis])):
            if axis not in row:
                row[axis] = max(
                    axes[axis],
                    key=lambda value, axis=axis, row=row: (
                        sum(pair in missing for pair in _pairs({**row, axis: value}, axis)),
                        -uses[axis, value],
                    ),
                )
        uses.update(row.items())
        for pair in combinations(sorted(row.items(), key=lambda item: item[0]), 2):
            missing.pop(pair, None)
        rows.append(tuple(row[axis] for axis in range(len(axes))))
    return rows


def _pairs(row: dict[int, Hashable], axis: int) -> list[tuple[Any, Any]]:
    """A row's pairs that an axis is part of."""
    here = (axis, row[axis])
    return [
        (there, here) if there[0] < axis else (here, there)
        for there in row.items()
        if there[0] != axis
    ]


def covering(rows: Sequence[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Return a subset of the rows with every pair of values that occurs in a row."""
    pairs_of = {row: {*combinations(enumerate(row), 2)} for row in rows}
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
