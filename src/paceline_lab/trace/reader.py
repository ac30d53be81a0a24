"""Reads and validates trace files, which `runtime/trace.py` writes.

Invariant: a file with an invalid line is rejected, with every fault of that line. A file without
its last lines, of an answer that was interrupted, is read as far as it goes.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from paceline.decoding.types import FORCED
from paceline.errors import InvalidRequest
from paceline.runtime.trace import FORM, VERSION, Seconds
from paceline.storage.validation import Count, Limit, validated

_Tokens = Annotated[list[Count], Limit(min_length=1)]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step after prefill. The fields have the names that they have in the file."""

    context: Count
    """Tokens in the KV cache before the step."""
    rows: Count
    """Rows of the call."""
    source: str
    """Source of the draft: `none`, `forced` (by a grammar), or a drafter."""
    match: Count
    """Length of the match before the draft, as the drafter reported it."""
    chances: list[float]
    """The drafter's probabilities of the draft tokens, if it has them."""
    proposed: list[Count]
    """Draft tokens."""
    guess: str
    """Text of the draft."""
    stood: Count
    """Number of draft tokens that were accepted."""
    tokens: _Tokens
    """New tokens: the accepted ones, then the bonus token."""
    pieces: list[str]
    """Text of `tokens`, one piece per token."""
    seconds: Seconds

    @property
    def drafted(self) -> int:
        """Number of draft tokens; 0 if a grammar forced them."""
        return 0 if self.source == FORCED else len(self.proposed)

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens; 0 if a grammar forced them."""
        return 0 if self.source == FORCED else self.stood

    @property
    def rejected(self) -> int:
        """Number of draft tokens that were rejected, or that the answer ended before."""
        return len(self.proposed) - self.stood

    @property
    def bonus(self) -> int:
        """Number of bonus tokens: 1, or 0 if the answer ended with a draft token."""
        return len(self.tokens) - self.stood


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The content of a trace file."""

    about: Mapping[str, Any]
    """`model`, `fingerprint`, `engine`, `settings` (of the request), `made`, `paceline`."""
    prompt: Sequence[int]
    """Token ids."""
    cached: int
    """Prompt tokens that were prefix cache hits."""
    first: Sequence[int]
    """The answer's first token, from prefill; empty if the answer was interrupted before it."""
    first_pieces: Sequence[str]
    prefill_seconds: float
    steps: Sequence[TracedStep]
    result: Mapping[str, Any] | None
    """`Result.as_dict()`; None if the answer was interrupted."""

    @property
    def answer(self) -> list[int]:
        """Token ids of the answer, as far as the file has them."""
        return [*self.first, *(token for step in self.steps for token in step.tokens)]


@dataclass(frozen=True, slots=True)
class _Head:
    model: str
    settings: dict[str, Any]
    cached: Count
    prompt_token_ids: _Tokens


@dataclass(frozen=True, slots=True)
class _First:
    tokens: _Tokens
    pieces: list[str]
    prefill_seconds: float


@dataclass(frozen=True, slots=True)
class _Last:
    result: dict[str, Any]


def read_trace(path: Path) -> RecordedTrace:
    """Read a trace, also that of an interrupted answer.

    Raises InvalidRequest if the file cannot be read or is no trace; the message names the line.
    """
    try:
        # The last line has no end if it was being written when the process ended.
        lines = [line.decode("utf-8") for line in path.read_bytes().split(b"\n")[:-1]]
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is no trace of paceline's: it is not UTF-8 text") from error
    return parse_trace(lines, str(path))


def parse_trace(lines: Sequence[str], name: str) -> RecordedTrace:
    """Parse the lines of a trace; `name` names it in messages.

    Raises InvalidRequest if they are no trace.
    """
    head: Any = None
    with contextlib.suppress(InvalidRequest):
        head = _json(lines[0] if lines else "", name)
    if not isinstance(head, dict) or head.get("form") != FORM:
        raise InvalidRequest(
            f"{name} is no trace of paceline's; make one with `paceline generate --trace FILE`"
        )
    if head.get("version") != VERSION:
        raise InvalidRequest(
            f"{name} is a trace of version {head.get('version')!r}; this paceline reads {VERSION}"
        )
    start = validated(_Head, head, f"line 1 of {name}")
    first, steps, result = _First([], [], 0.0), [], None
    for number, line in enumerate(lines[1:], start=2):
        where = f"line {number} of {name}"
        value = _json(line, where)
        if number == len(lines) and isinstance(value, dict) and "result" in value:
            result = validated(_Last, value, where).result
        elif number == 2:
            first = validated(_First, value, where)
        else:
            steps.append(validated(TracedStep, value, where))
    return RecordedTrace(
        about={key: fact for key, fact in head.items() if key != "prompt_token_ids"},
        prompt=start.prompt_token_ids,
        cached=start.cached,
        first=first.tokens,
        first_pieces=first.pieces,
        prefill_seconds=first.prefill_seconds,
        steps=steps,
        result=result,
    )


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from error
