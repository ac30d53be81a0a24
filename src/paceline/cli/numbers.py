"""Parsers of option values: numbers in a range, and the few values that are not one number.

Invariant: every number is checked where the command line is read, so that no command gets one that
is not finite or is out of its range. `int` and `float` without a parser are not used as the type
of an option. Every parser raises BadParameter.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from typer import BadParameter

_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `least` to `most`."""

    least: int
    most: int = _MAX

    def __call__(self, text: str) -> int:
        """Parse a value."""
        try:
            value = int(text)
        except ValueError:  # also for more digits than Python reads
            value = None
        if value is None or not self.least <= value <= self.most:
            raise BadParameter(f"{_short(text)} is not a whole number {self._range}")
        return value

    @property
    def _range(self) -> str:
        if self.most == _MAX:
            return f"of {self.least} or more"
        return f"from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number from `least` to `most`, or above `least`."""

    least: float
    most: float
    open: bool = False
    """Whether `least` itself is excluded."""

    def __call__(self, text: str) -> float:
        """Parse a value."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most or (self.open and value == self.least):
            raise BadParameter(
                f"{_short(text)} is not a number {'above' if self.open else 'from'} "
                f"{self.least:g}{', up' if self.open else ''} to {self.most:g}"
            )
        return value


@dataclass(frozen=True, slots=True)
class Wholes:
    """Whole numbers with commas between them, each in a range; or one word instead."""

    each: Whole
    word: str | None = None

    def __call__(self, text: str) -> tuple[int, ...] | str:
        """Parse a value."""
        if text == self.word:
            return text
        return tuple(self.each(part) for part in text.split(","))


@dataclass(frozen=True, slots=True)
class WholeOr:
    """A whole number of `least` or more, or a word for a number."""

    least: int
    word: str
    meaning: str
    value: int | str

    def __call__(self, text: str) -> int | str:
        """Parse a value."""
        if text == self.word:
            return self.value
        try:
            return Whole(self.least)(text)
        except BadParameter as error:
            raise BadParameter(f"{error}, nor {self.meaning}") from None


def bias(text: str) -> tuple[int, float]:
    """Token id and bias of TOKEN=BIAS."""
    token, equals, value = text.partition("=")
    if not equals:
        raise BadParameter(f"{_short(text)} is not TOKEN=BIAS, as in 42=-5")
    return Whole(0)(token), Real(-1e6, 1e6)(value)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadParameter(f"{text[:40]!r} is not a JSON object")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


BLOCK = Whole(2, 32)
"""Rows of a block: at most `paceline.engines.profile.MAX_ROWS`."""
COUNT = Whole(1)
GIGABYTES = Real(0, 1e6, open=True)
LIMIT = WholeOr(1, "-1", "-1 for no limit", -1)
PENALTY = Real(-100, 100)
PORT = Whole(0, 2**16 - 1)
PROBABILITY = Real(0, 1)
RATE = Real(1e-3, 1e5)
"""Requests per second."""
SECONDS = Real(0, 365 * 24 * 3600)
SEED = Whole(0, 2**64 - 1)
TEMPERATURE = Real(0, 100)
THREADS = Whole(1, 4096)
TIMEOUT = Real(0, SECONDS.most, open=True)
