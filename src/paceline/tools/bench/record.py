"""The one form of a recorded result, whatever was measured: written, read, and never half believed.

A record is a head (when, by which command and versions, on which machine, with which model, engine,
prompts and settings) and rows. A row is one measurement: one case by one variant, with the values
of every round, so that medians, spreads, ratios of ratios and charts need nothing else. Knows the
form; knows nothing of how things are measured or drawn. The rule: what is read is validated whole,
and a file that is no such result is refused in one line.
"""

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import paceline
from paceline.errors import InvalidRequest
from paceline.storage.files import write_bytes, writing
from paceline.storage.report import json_file
from paceline.tools.bench.record_faults import record_faults

FORM = "paceline-bench"
VERSION = 1

PACKAGES = ("numpy", "openvino", "tokenizers")
"""Whose versions every record names, where they are installed."""


class Spread(NamedTuple):
    """What several rounds gave."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: a case by a variant. No two rows of a record have both in common."""

    case: str
    """What was asked: a prompt's id, or what else tells cases apart, such as `code, 372 tokens`."""
    kind: str
    """What kind of prompt it is; `any` where there are none."""
    contender: str
    """Who answered. What others are compared with is called `plain`."""
    measures: Mapping[str, Sequence[float]]
    """Name -> its value in each round, in the rounds' order. All variants of a case took part in
    the same rounds, so that values at one place belong together. Usual names: `ratio` (decode speed
    over plain's, in the same round), `ratio_single_row` (over single-row plain's),
    `ratio_with_prefill` (over plain's, the prompt included), `decode_tokens_per_second`,
    `prefill_tokens_per_second`, `tokens_per_step`, `acceptance_rate`; and in seconds
    `first_token_seconds`, `prefill_seconds`, `decode_seconds`, of which `draft_seconds`,
    `verify_seconds` and `sample_seconds` are parts. What was not measured is not there."""
    at: Mapping[str, float | str] = field(default_factory=dict)
    """What else the case is at, by name: `prompt_tokens`, `depth`, `block`, `temperature`. Numbers
    are what a curve is drawn over. `state` is `cold` for the first request after loading."""
    counts: Mapping[str, int | Sequence[int] | Mapping[str, int]] = field(default_factory=dict)
    """Whole numbers, summed over the rounds: `steps`, `drafted`, `accepted`; by drafter as
    `drafted_by`, `accepted_by`; by position in the draft, the first at 0, as `drafted_at`,
    `accepted_at`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The rest, as JSON. Usual names: `tokens` and `prompt_tokens`; `same_tokens`, whether the
    answer of every round equals the variant's own plain answer; `way`, what variants have in
    common that differ only in a number of `at`, such as the block: a curve over it joins them."""

    @property
    def key(self) -> tuple[str, str]:
        """Case and variant."""
        return self.case, self.contender

    def spread(self, measure: str) -> Spread | None:
        """Median, least and most of a measure over the rounds; None where it was not measured."""
        values = self.measures.get(measure)
        return spread(values) if values else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is empty is left out."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value or name in ("case", "kind", "contender", "measures")
        }


@dataclass(frozen=True, slots=True)
class Record:
    """A result. `head` and `finish` say what is true of this process and of now."""

    kind: str
    """`run`, `sweep`, `simulate`, `peers`, `serve`, ..."""
    rows: Sequence[Row]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for and decides what comes out; no paths, no times."""
    model: Mapping[str, str] | None = None
    """`name` and `fingerprint`; None where there was no model of ours."""
    engine: Mapping[str, str] | None = None
    """As the engine describes itself."""
    suite_sha256: str | None = None
    """Of the prompts' file."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """What follows from the rows, for people and for `jq`; nothing here reads it."""
    made: str = ""
    """UTC, as ISO 8601 has it."""
    command: str = ""
    paceline: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def contenders(self) -> list[str]:
        """In the order of their first rows."""
        return list(dict.fromkeys(row.contender for row in self.rows))

    @property
    def cases(self) -> list[str]:
        """In the order of their first rows."""
        return list(dict.fromkeys(row.case for row in self.rows))

    @property
    def kinds(self) -> list[str]:
        """In the order of their first rows."""
        return list(dict.fromkeys(row.kind for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the head, then the rows."""
        names = [each.name for each in fields(self) if each.name not in ("rows", "kind")]
        head = ["made", "command", "paceline", "versions", "machine", "model", "engine"]
        names.sort(key=lambda name: head.index(name) if name in head else len(head))
        return {
            "form": FORM,
            "version": VERSION,
            "kind": self.kind,
            **{name: getattr(self, name) for name in names},
            "rows": [row.as_dict() for row in self.rows],
        }


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most of at least one value."""
    return Spread(median(values), min(values), max(values))


def here(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """What a record says of this process: when, by which command and versions, on which machine.

    >>> Record("run", rows, **here())
    """
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "paceline": paceline.__version__,
        "versions": {"python": platform.python_version(), **dict(_versions(packages))},
        "machine": {"processor": _processor(), "cores": _cores(), "system": platform.system()},
    }


def write_record(path: Path, record: Record) -> None:
    """Write a record, beside and renamed.

    Raises:
        InvalidRequest: it cannot be written.
    """
    with writing(path):
        write_bytes(path, json_file(record.as_dict()))


def read_record(path: Path) -> Record:
    """A record, validated whole.

    Raises:
        InvalidRequest: it cannot be read, is broken off, or is something else; one line says what.
    """
    return parse_record(read_value(path), str(path))


def read_value(path: Path) -> Any:
    """The JSON in a file. Raises InvalidRequest when it cannot be read, or is broken off."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is no result of `paceline bench`: not UTF-8 text") from error
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{path} is no result of `paceline bench`, or is broken off: {error}"
        ) from error


def parse_record(value: Any, name: str) -> Record:
    """A record from what JSON gave; `name` is what messages call it.

    Raises:
        InvalidRequest: it is something else; the message names the first faults.
    """
    if not isinstance(value, dict) or value.get("form") != FORM:
        raise InvalidRequest(
            f'{name} is no result of `paceline bench`: expected a JSON object with "form": '
            f'"{FORM}"; if an older version made it, measure again'
        )
    if value.get("version") != VERSION:
        raise InvalidRequest(
            f"{name} has version {value.get('version')!r} of the form; this paceline reads version "
            f"{VERSION}"
        )
    faults = [*record_faults(value)]
    if faults:
        more = f" (and {len(faults) - _SHOWN} more)" if len(faults) > _SHOWN else ""
        raise InvalidRequest(f"{name} cannot be used: {'; '.join(faults[:_SHOWN])}{more}")
    known = {each.name for each in fields(Record)} - {"rows"}
    return Record(
        rows=[row_of(row) for row in value["rows"]],
        **{key: each for key, each in value.items() if key in known},
    )


def row_of(value: Mapping[str, Any]) -> Row:
    """A row from JSON that has no `row_faults`."""
    return Row(**{each.name: value[each.name] for each in fields(Row) if each.name in value})


_SHOWN = 3
"""Faults that a message names."""


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def _versions(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in packages:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _processor() -> str:
    """What the processor is called, as well as the system can say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
