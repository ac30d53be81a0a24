"""Conditions that end a response: limits, stop tokens, stop strings, and repetition.

A response repeats itself when its last tokens are one pattern several times. The patterns are those
of vLLM's `repetition_detection`, with the same size, count and order of checks. The detector is a
state machine over the response's tokens alone, so the end of a response does not depend on drafts,
blocks or policies. A token costs one comparison per pattern size, however long the response is.
"""

from dataclasses import dataclass

import numpy as np

MAX_PATTERN_SIZE = 1024
"""Upper bound of `max_pattern_size`, in tokens."""

MAX_COUNT = 1_000_000
"""Upper bound of `min_count` and `min_tokens`."""


def _require(name: str, value: object, min_value: int, max_value: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not min_value <= value <= max_value:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}; expected {min_value} to {max_value}")


@dataclass(frozen=True, slots=True)
class Repetition:
    """The smallest repetition that counts as a loop.

    Raises ValueError if a value is out of range; the message names the value.
    """

    max_pattern_size: int
    """Tokens of the longest pattern."""
    min_pattern_size: int = 1
    """Tokens of the shortest pattern; 0 means 1."""
    min_count: int = 2
    """Occurrences of the pattern, including the first."""
    min_tokens: int = 0
    """Tokens of all occurrences together, so that a rule of 40 dashes does not count."""

    def __post_init__(self) -> None:
        _require("max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        _require("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        _require("min_count", self.min_count, 2, MAX_COUNT)
        _require("min_tokens", self.min_tokens, 0, MAX_COUNT)


DEFAULT = Repetition(max_pattern_size=128, min_count=4, min_tokens=256)
"""Default for interactive responses; chosen in docs/decisions/first-answer.md."""


class RepetitionDetector:
    def __init__(self, rule: Repetition) -> None:
        first = max(rule.min_pattern_size, 1)
        sizes = np.arange(first, rule.max_pattern_size + 1)
        count = np.maximum(rule.min_count, -(-rule.min_tokens // sizes))
        self._first = first - 1
        # [sizes]: consecutive tokens equal to the one a pattern earlier that make a loop.
        self._needed = sizes * (count - 1)
        self._equal = np.zeros_like(sizes)
        self._last = np.full(rule.max_pattern_size, -1, np.int64)  # newest first

    def push(self, token: int) -> bool:
        """Append the response's next token; return True if the last tokens are now a loop."""
        self._equal += 1
        self._equal *= self._last[self._first :] == token
        self._last[1:] = self._last[:-1]
        self._last[0] = token
        return bool((self._equal >= self._needed).any())


@dataclass(frozen=True, slots=True)
class Stopping:
    """Conditions that end a response, not checked here: `paceline.options` has the ranges."""

    max_tokens: int | None = None
    """Maximum tokens of the response; None: up to the context limit."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the response; such a token is the last of `answer`, but not in the text."""
    stop: tuple[str, ...] = ()
    """Strings that end the response; its text ends before the earliest one."""
    min_tokens: int = 0
    """Tokens before `stop_token_ids` or a repetition may end the response."""
    repetition: Repetition | None = None
    """Repetition that ends the response; None disables the check."""
