"""Wait for a condition, however busy the machine is."""

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Timeout in seconds: beyond it something has failed."""


def until(true: Callable[[], bool]) -> None:
    """Wait for it; it has to come."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)
