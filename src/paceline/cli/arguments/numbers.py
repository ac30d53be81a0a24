"""Types of numeric arguments.

The rule: a number is checked where the command line is read, so that no command gets one that is
not finite or is out of its range. `int` and `float` are not used as the type of an argument.
"""

import math
from argparse import ArgumentTypeError
from dataclasses import dataclass

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `least` to `most`."""

    least: int
    most: int = _MOST

    def __call__(self, text: str) -> int:
        """The number. Raises ArgumentTypeError for any other text."""
        try:
            value = int(text)
        except ValueError:  # also for more digits than Python reads
            value = None
        if value is None or not self.least <= value <= self.most:
            raise ArgumentTypeError(f"{_short(text)} is not a whole number {self._range}")
        return value

    @property
    def _range(self) -> str:
        if self.most == _MOST:
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
        """The number. Raises ArgumentTypeError for any other text."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most or (self.open and value == self.least):
            raise ArgumentTypeError(
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
        """The numbers, or the word. Raises ArgumentTypeError for any other text."""
        if text == self.word:
            return text
        return tuple(self.each(part) for part in text.split(","))


@dataclass(frozen=True, slots=True)
class Place:
    """A number of tokens, or `max`."""

    least: int

    def __call__(self, text: str) -> int | str:
        """The number, or the word. Raises ArgumentTypeError for any other text."""
        if text == "max":
            return text
        try:
            return Whole(self.least)(text)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{error}, nor max") from None


class Limit:
    """A number of tokens, or -1 for no limit."""

    def __call__(self, text: str) -> int:
        """The number. Raises ArgumentTypeError for any other text."""
        try:
            return -1 if text == "-1" else Whole(1)(text)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{error}, nor -1 for no limit") from None


class Bias:
    """TOKEN=BIAS."""

    def __call__(self, text: str) -> tuple[int, float]:
        """Token id and bias. Raises ArgumentTypeError for any other text."""
        token, equals, value = text.partition("=")
        if not equals:
            raise ArgumentTypeError(f"{_short(text)} is not TOKEN=BIAS, as in 42=-5")
        return Whole(0)(token), Real(-1e6, 1e6)(value)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


BLOCK = Whole(2, 32)
"""Rows of a block: at most `paceline.engines.profile.MAX_ROWS`."""

COUNT = Whole(1)

PENALTY = Real(-100, 100)

PORT = Whole(0, 2**16 - 1)

PROBABILITY = Real(0, 1)

RATE = Real(1e-3, 1e5)
"""Requests a second."""

SECONDS = Real(0, 365 * 24 * 3600)

SEED = Whole(0, 2**64 - 1)

TEMPERATURE = Real(0, 100)

THREADS = Whole(1, 4096)

TIMEOUT = Real(0, SECONDS.most, open=True)
