"""Parsers of option values: numbers in a range, and the few values that are not one number.

Every parser raises ValueError. Invariant: every number is checked where the command line is read,
so that no command gets one that is not finite or is out of its range: `int` and `float` without a
parser are not used as the type of an option.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.options import BIAS, BIAS_TOKEN, RANGES, Real, Whole, shown
from paceline.system.machine import cpu_cores, memory_bytes


@dataclass(frozen=True, slots=True)
class WholeOr:
    """A whole number from `min_value` to `max_value`, or a word for a value."""

    min_value: int
    word: str
    meaning: str
    value: int | str | None
    max_value: int | None = None

    def __call__(self, text: str) -> Any:
        if text == self.word:
            return self.value
        try:
            return Whole(self.min_value, self.max_value)(text)
        except ValueError as error:
            raise ValueError(f"{error}, nor {self.meaning}") from None


def bias(text: str) -> tuple[int, float]:
    """Token id and bias of TOKEN=BIAS."""
    token, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{shown(text)} is not TOKEN=BIAS, as in 42=-5")
    return BIAS_TOKEN(token), BIAS(value)


def json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise ValueError(f"{shown(text)} is not a JSON object")


def memory(text: str) -> Any:
    """Parse gigabytes, at most those of this machine."""
    return Real(0, round(memory_bytes() / 1e9, 1), open=True)(text)


BLOCK, TEMPERATURE = RANGES["max_block"], RANGES["temperature"]
COUNT = Whole(1, 2**31 - 1)
GIGABYTES = Real(0, 1e6, open=True)
LIMIT = WholeOr(1, "-1", "-1 for no limit", -1)
PROBABILITY = Real(0, 1)
CLIENTS = Whole(1, 1024)
PARALLEL = Whole(1, 32)
PORT = Whole(0, 2**16 - 1)
SECONDS = Real(0, 365 * 24 * 3600)
_CPUS = cpu_cores()
THREADS = WholeOr(1, "auto", f"auto; there are {_CPUS} CPUs", None, _CPUS)
TIMEOUT = Real(0, SECONDS.max_value, open=True)
