"""A benchmark's recorded result as one JSON file: written, read and validated.

A record has a head (time, command, versions, machine, model, engine, prompts, settings) and rows. A
row is one measurement: one case by one contender, with the values of every round, so medians,
spreads and charts need nothing else. Independent of how results are measured or drawn.
Invariant: a file is validated as a whole, and every fault is reported.
"""

import datetime
import json
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import paceline
from paceline.errors import InvalidRequest
from paceline.storage.text import decode
from paceline.storage.validation import Limit, validated
from paceline.system.machine import cpu_cores, processor

FORM = "paceline-bench"
VERSION = 1

PACKAGES = ("numpy", "tokenizers", "xllamacpp")
"""Packages whose versions are recorded, if they are installed."""

_HEAD = ("made", "command", "paceline", "settings", "versions", "machine")
"""Fields that a file must have although `Record` has defaults for them."""

_ORDER = (
    *("made", "command", "paceline", "versions", "machine", "model", "engine"),
    *("settings", "suite_sha256", "summary"),
)
"""Fields of the head, in the order of a file."""

_Number = Annotated[float, Limit(allow_inf_nan=False, ge=-(10**15), le=10**15)]
"""A number; larger magnitudes would overflow a chart's arithmetic."""


class Spread(NamedTuple):
    """Median and range of a measure over several rounds."""

    median: float
    min_value: float
    max_value: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.min_value:.2f} to {self.max_value:.2f})"

    def as_dict(self) -> dict[str, float]:
        """Return the values by their names in JSON."""
        return {"median": self.median, "least": self.min_value, "most": self.max_value}

    def rounded(self, digits: int) -> str:
        """Return the median with the range, or the median alone if all three round to it."""
        texts = [f"{value:.{digits}f}" for value in self]
        return texts[0] if len(set(texts)) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: a case by a contender. A record has at most one row per pair."""

    case: str
    """Id of the prompt, or another unique name of the case, such as `code, 372 tokens`."""
    kind: str
    """Kind of prompt; `any` if there are none."""
    contender: str
    """Name of the contender that answered. The baseline is called `plain`."""
    measures: Mapping[str, Sequence[_Number]]
    """Name -> its values, by round. All contenders of a case took part in the same rounds, so the
    values at one index belong together. Usual names: `ratio` (decode speed over plain decoding's
    in the same round), `ratio_single_row` (over single-row plain decoding's), `ratio_with_prefill`
    (over plain decoding's, prefill included), `decode_tokens_per_second`,
    `prefill_tokens_per_second`, `tokens_per_step`, `acceptance_rate`; in seconds
    `first_token_seconds`, `prefill_seconds`, `decode_seconds`, and its parts `draft_seconds`,
    `verify_seconds` and `sample_seconds`. Ratios are more than 0."""
    at: Mapping[str, int | _Number | str] = field(default_factory=dict)
    """Parameters of the case: `prompt_tokens`, `depth` (context before the question, in tokens),
    `block`, `temperature`. Charts use the numeric ones as axes."""
    counts: Mapping[str, int | list[int] | Mapping[str, int]] = field(default_factory=dict)
    """Sums over the rounds: `steps`, `drafted`, `accepted`, `fallbacks`; by drafter as
    `drafted_by`, `accepted_by`; by position in a draft, from 0, as `drafted_at`, `accepted_at`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Any other values, as JSON. Usual names: `tokens` and `prompt_tokens`; `same_tokens`, true if
    the answers of all rounds equal plain decoding's; `way`, the name of a curve over a number of
    `at` (such as the block) that joins the contenders that differ in nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for a measure without values, or a ratio that is not more than 0."""
        for name, values in self.measures.items():
            if not values:
                raise ValueError(f"measures.{name} is empty")
            if "ratio" in name.split("_") and min(values) <= 0:
                raise ValueError(f"measures.{name} is {min(values)}, expected more than 0")

    @property
    def key(self) -> tuple[str, str]:
        return self.case, self.contender

    def spread(self, measure: str) -> Spread | None:
        values = self.measures.get(measure)
        return spread(values) if values else None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON, without empty fields."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value or name in ("case", "kind", "contender", "measures")
        }


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded result; `here()` has the fields that describe this process."""

    kind: str
    """`run`, `sweep`, `simulate`, `peers`, ..."""
    rows: Sequence[Row]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options that the result depends on; no paths, no times."""
    model: Mapping[str, str] | None = None
    """`name` and `fingerprint`; None if this process loaded no model."""
    engine: Mapping[str, str] | None = None
    """`Engine.describe()`."""
    suite_sha256: str | None = None
    """SHA-256 of the prompt file."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Aggregates of the rows, for people and `jq`; only `bench report` reads it."""
    made: str = ""
    """Time of the measurement, UTC in ISO 8601."""
    command: str = ""
    paceline: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def contenders(self) -> list[str]:
        """The contenders, in the order of their first rows."""
        return list(dict.fromkeys(row.contender for row in self.rows))

    @property
    def cases(self) -> list[str]:
        """The cases, in the order of their first rows."""
        return list(dict.fromkeys(row.case for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Return the record as JSON: the head, then the rows."""
        return {
            **{"form": FORM, "version": VERSION, "kind": self.kind},
            **{name: getattr(self, name) for name in _ORDER},
            "rows": [row.as_dict() for row in self.rows],
        }


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def here() -> dict[str, Any]:
    """Return a record's fields that describe this process: time, command, versions, machine.

    >>> Record("run", rows, **here())
    """
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "paceline": paceline.__version__,
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "machine": {"processor": processor(), "cores": cpu_cores(), "system": platform.system()},
    }


def read_record(path: Path) -> Record:
    """Read and validate a record. Raises InvalidRequest, with one line per fault."""
    try:
        text = decode(path.read_bytes(), path)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{path} is not a result of `paceline bench`, or is truncated: {error}"
        ) from error
    return parse_record(value, str(path))


def parse_record(value: Any, name: str) -> Record:
    """Validate parsed JSON as a record; messages use `name`.

    Raises InvalidRequest if it is not a record; the message has one line per fault.
    """
    if not isinstance(value, dict) or value.get("form") != FORM:
        raise InvalidRequest(
            f'{name} is not a result of `paceline bench`: expected a JSON object with "form": '
            f'"{FORM}"; if an older version made it, measure again'
        )
    if value.get("version") != VERSION:
        raise InvalidRequest(
            f"{name} has version {value.get('version')!r} of the form; this paceline reads version "
            f"{VERSION}"
        )
    record = validated(Record, {**dict.fromkeys(_HEAD), **value}, name)
    for (case, contender), count in Counter(row.key for row in record.rows).items():
        if count > 1:
            raise InvalidRequest(f"{name}: rows: {case!r} by {contender!r} is there twice")
    return record


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
