"""Traces as files: what `trace.py` writes, read and validated.

The rule: a file that is no trace, or one with a line that is wrong, is refused in one line; one
that was broken off is read up to there.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.decoding.generation import FORCED
from paceline.errors import InvalidRequest
from paceline.runtime.trace import FORM, VERSION, Seconds


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step after the prompt."""

    context: int
    """Tokens whose keys and values were there before it."""
    rows: int
    """Of the call."""
    source: str
    """Who proposed; `none`, `forced`, or a drafter."""
    match: int
    """What the drafter said of its first token: how many before it matched."""
    chances: Sequence[float]
    """What it said of each, if it did."""
    proposed: Sequence[int]
    guess: str
    """Their text."""
    stood: int
    """How many of them were kept."""
    tokens: Sequence[int]
    """What came: those that stood, and the model's own behind them."""
    pieces: Sequence[str]
    """The text of each of `tokens`."""
    seconds: Seconds

    @property
    def drafted(self) -> int:
        """How many guesses there were: what a grammar forces is none."""
        return 0 if self.source == FORCED else len(self.proposed)

    @property
    def accepted(self) -> int:
        """How many of the guesses stood."""
        return 0 if self.source == FORCED else self.stood

    @property
    def refused(self) -> int:
        """How many proposed tokens did not stand, or came to be behind the answer's end."""
        return len(self.proposed) - self.stood

    @property
    def own(self) -> int:
        """How many tokens the model said itself: one, or none at the answer's end."""
        return len(self.tokens) - self.stood


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace that was read."""

    about: Mapping[str, Any]
    """`model`, `fingerprint`, `engine`, `settings` (as asked), `made`, `paceline`."""
    prompt: Sequence[int]
    """Its token ids."""
    cached: int
    """How many of them needed not be computed."""
    first: Sequence[int]
    """The answer's first token, which the prompt's last call brings; empty: not even that came."""
    first_pieces: Sequence[str]
    prefill_seconds: float
    steps: Sequence[TracedStep]
    result: Mapping[str, Any] | None
    """`Result.as_dict()`; None: broken off."""

    @property
    def answer(self) -> list[int]:
        """Its token ids, as far as they were written."""
        return [*self.first, *(token for step in self.steps for token in step.tokens)]


def read_trace(path: Path) -> Recorded:
    """A trace, also of an answer that was broken off.

    Raises:
        InvalidRequest: it cannot be read, or it is no trace; the message names the line.
    """
    try:
        # Without the end of a line that was being written when all ended.
        lines = [line.decode("utf-8") for line in path.read_bytes().split(b"\n")[:-1]]
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is no trace of paceline's: it is not UTF-8 text") from error
    return parse_trace(lines, str(path))


def parse_trace(lines: Sequence[str], name: str) -> Recorded:
    """The trace that these lines are; `name` is what messages call it.

    Raises:
        InvalidRequest: they are none.
    """
    head: dict[str, Any] = {}
    with contextlib.suppress(InvalidRequest):
        head = _object(lines[0] if lines else "", name, 1)
    if head.get("form") != FORM:
        raise InvalidRequest(
            f"{name} is no trace of paceline's; make one with `paceline generate --trace FILE`"
        )
    if head.get("version") != VERSION:
        raise InvalidRequest(
            f"{name} is a trace of version {head.get('version')!r}; this paceline reads {VERSION}"
        )
    _check(head, _HEAD, name, 1)
    rest = [_object(line, name, number) for number, line in enumerate(lines[1:], start=2)]
    result = None
    if rest and "result" in rest[-1]:
        result = rest.pop()["result"]
        if not isinstance(result, dict):
            raise InvalidRequest(f"line {len(lines)} of {name}: result is no object")
    for number, line in enumerate(rest, start=2):
        _check(line, _FIRST if number == 2 else _STEP, name, number)
    first: dict[str, Any] = (
        rest[0] if rest else {"tokens": [], "pieces": [], "prefill_seconds": 0.0}
    )
    return Recorded(
        about={key: each for key, each in head.items() if key != "prompt_token_ids"},
        prompt=head["prompt_token_ids"],
        cached=head["cached"],
        first=first["tokens"],
        first_pieces=first["pieces"],
        prefill_seconds=first["prefill_seconds"],
        steps=[_step(line) for line in rest[1:]],
        result=result,
    )


def _step(line: Mapping[str, Any]) -> TracedStep:
    values = {name: line[name] for name in _STEP}
    return TracedStep(**{**values, "seconds": Seconds(**{n: line["seconds"][n] for n in _SECONDS})})


def _object(line: str, name: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"line {number} of {name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"line {number} of {name} is not a JSON object")
    return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are(fits: Any) -> Any:
    return lambda value: isinstance(value, list) and all(map(fits, value))


_SECONDS = Seconds._fields
_HEAD = {
    "model": (lambda value: isinstance(value, str), "text"),
    "settings": (lambda value: isinstance(value, dict), "an object"),
    "cached": (_is_whole, "a whole number"),
    "prompt_token_ids": (lambda value: value and _are(_is_whole)(value), "token ids"),
}
_CAME = {
    "tokens": (lambda value: value and _are(_is_whole)(value), "token ids"),
    "pieces": (_are(lambda each: isinstance(each, str)), "texts"),
}
_FIRST = {**_CAME, "prefill_seconds": (_is_number, "a number")}
_STEP = {
    "context": (_is_whole, "a whole number"),
    "rows": (_is_whole, "a whole number"),
    "source": (lambda value: isinstance(value, str), "text"),
    "match": (_is_whole, "a whole number"),
    "chances": (_are(_is_number), "numbers"),
    "proposed": (_are(_is_whole), "token ids"),
    "guess": (lambda value: isinstance(value, str), "text"),
    "stood": (_is_whole, "a whole number"),
    **_CAME,
    "seconds": (
        lambda value: isinstance(value, dict) and all(_is_number(value.get(n)) for n in _SECONDS),
        f"an object with {', '.join(_SECONDS)}",
    ),
}
"""What each kind of line has: how a value is known, and what is expected."""


def _check(line: Mapping[str, Any], expected: Mapping[str, Any], name: str, number: int) -> None:
    for key, (fits, words) in expected.items():
        if not fits(line.get(key)):
            text = repr(line.get(key))
            raise InvalidRequest(f"line {number} of {name}: {key} is {text[:40]}; expected {words}")
