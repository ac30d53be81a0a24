"""Conditions that end an answer."""

from dataclasses import dataclass

from paceline.decoding.repetition import Repetition


@dataclass(frozen=True, slots=True)
class Stopping:
    """When an answer ends.

    Raises:
        ValueError: `max_tokens` is under 1, `min_tokens` is negative, or a stop string is empty.
    """

    max_tokens: int | None = None
    """Maximum tokens of the answer; None: up to the context limit."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer. The last of `answer`, but not in its text."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; its text ends before the earliest one."""
    min_tokens: int = 0
    """Tokens before `stop_token_ids` or a repetition may end the answer."""
    repetition: Repetition | None = None
    """Repetition that ends the answer; None: none does."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected 1 or more")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is {self.min_tokens}; expected 0 or more")
        if not all(self.stop):
            raise ValueError("a stop string is empty; expected at least one character")
