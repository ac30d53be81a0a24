"""For what has to come, however busy the machine is."""

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds after which something has gone wrong."""


def until(true: Callable[[], bool]) -> None:
    """Wait for it; it has to come."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)
