"""Taking turns: the machine is shared with whatever else it does, so nobody gets a minute alone.

In every round each way is tried once, in an order that rotates, and what is compared later is
compared within the round.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

_T = TypeVar("_T")


def in_turns(
    ways: Mapping[str, Callable[[], _T]], rounds: int, start: int = 0
) -> dict[str, list[_T]]:
    """Try each way `rounds` times; who begins moves on by one a round, from `start`.

    Returns:
        Name -> what it gave in each round, in the order of `ways`.
    """
    found: dict[str, list[_T]] = {name: [] for name in ways}
    names = [*ways]
    for turn in range(start, start + rounds):
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            found[name].append(ways[name]())
    return found
