"""Parsers of option values: numbers in a range, and the few values that are not one number.

Every parser raises BadParameter. Invariant: every number is checked where the command line is read,
so that no command gets one that is not finite or is out of its range: `int` and `float` without a
parser are not used as the type of an option.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typer import BadParameter

from paceline import options
from paceline.options import RANGES
from paceline.system.machine import cpu_cores, memory_bytes

_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class WholeParser(options.Whole):
    max_value: int | None = _MAX

    def __str__(self) -> str:
        limit = None if self.max_value == _MAX else self.max_value
        return str(options.Whole(self.min_value, limit))

    def __call__(self, text: str) -> int:
        return int(_parsed(self, int, text))


@dataclass(frozen=True, slots=True)
class RealParser(options.Real):
    """Parses a finite number in the range."""

    def __call__(self, text: str) -> float:
        return float(_parsed(self, float, text))


def _parsed(limits: WholeParser | RealParser, kind: Callable[[str], float], text: str) -> float:
    try:
        value = kind(text)
    except ValueError:  # also for more digits than Python reads
        value = math.nan
    if not limits.allows(value):
        raise BadParameter(f"{_short(text)} is not {limits}")
    return value


def of(name: str) -> WholeParser | RealParser:
    """The parser of an option of answers."""
    limits = RANGES[name]
    if isinstance(limits, options.Whole):
        return WholeParser(limits.min_value, limits.max_value)
    return RealParser(limits.min_value, limits.max_value, limits.open)


@dataclass(frozen=True, slots=True)
class WholeOr:
    """A whole number from `min_value` to `max_value`, or a word for a value."""

    min_value: int
    word: str
    meaning: str
    value: int | str | None
    max_value: int = _MAX

    def __call__(self, text: str) -> int | str | None:
        if text == self.word:
            return self.value
        try:
            return WholeParser(self.min_value, self.max_value)(text)
        except BadParameter as error:
            raise BadParameter(f"{error}, nor {self.meaning}") from None


def bias(text: str) -> tuple[int, float]:
    """Token id and bias of TOKEN=BIAS."""
    token, equals, value = text.partition("=")
    if not equals:
        raise BadParameter(f"{_short(text)} is not TOKEN=BIAS, as in 42=-5")
    return _BIAS_TOKEN(token), _BIAS(value)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadParameter(f"{text[:40]!r} is not a JSON object")
    return value


def memory(text: str) -> float:
    """Parse gigabytes, at most those of this machine."""
    return RealParser(0, round(memory_bytes() / 1e9, 1), open=True)(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


_BIAS_TOKEN = WholeParser(options.BIAS_TOKEN.min_value)
_BIAS = RealParser(options.BIAS.min_value, options.BIAS.max_value)

BLOCK = of("max_block")
COUNT = WholeParser(1)
GIGABYTES = RealParser(0, 1e6, open=True)
LIMIT = WholeOr(1, "-1", "-1 for no limit", -1)
PROBABILITY = RealParser(0, 1)
CLIENTS = WholeParser(1, 1024)
PARALLEL = WholeParser(1, 32)
PORT = WholeParser(0, 2**16 - 1)
SECONDS = RealParser(0, 365 * 24 * 3600)
SEED = of("seed")
TEMPERATURE = of("temperature")
_CPUS = cpu_cores()
THREADS = WholeOr(1, "auto", f"auto; there are {_CPUS} CPUs", None, _CPUS)
TIMEOUT = RealParser(0, SECONDS.max_value, open=True)
