"""Writes records as charts, and as one self-contained page of HTML.

Invariant: the same results give the same bytes, so the output has no current time and no paths.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.storage.files import write_bytes, writing
from paceline.storage.report import Table
from paceline_lab.bench.record import Record, Row, read_record
from paceline_lab.bench.summary import group_tables, notes
from paceline_lab.report.charts import record_charts
from paceline_lab.report.drawing import picture
from paceline_lab.report.page import Section, page

_PAGE = "index.html"

_ABOUT = {
    "run": "drafters against plain decoding, by prompt",
    "sweep": "drafters against plain decoding, over lengths or depths",
    "peers": "other runtimes on the same prompts",
    "simulate": "drafters on recorded texts, without the model",
    "agent": "an agent's session, turn by turn",
}

_COLUMNS = (
    ("ratio", "/ plain", 2),
    ("ratio_single_row", "/ plain of 1 row", 2),
    ("decode_tokens_per_second", "decode tok/s", 1),
    ("prefill_tokens_per_second", "prefill tok/s", 0),
    ("first_token_seconds", "first token, s", 2),
    ("tokens_per_step", "tau", 2),
    ("acceptance_rate", "accepted", 2),
)


_SAME = {"True": "yes", "False": "NO"}


def write_report(paths: Sequence[Path], output: Path) -> list[Path]:
    """Draw results of `bench ... --output`: a page, and every chart as PNG, in the folder `output`.

    Returns the paths written, the page first. Raises InvalidRequest if a file is not a result, two
    have one name, or the folder cannot be written, and MissingExtra if matplotlib is not installed.
    """
    records = {path.stem: read_record(path) for path in paths}
    if len(records) < len(paths):
        raise InvalidRequest("two results have the same name; rename one")
    sections, written = [], {output / _PAGE: b""}
    for name, record in records.items():
        charts = record_charts(record)
        drawn = [(chart, picture(chart, "svg", record.contenders)) for chart in charts]
        about = _ABOUT.get(record.kind, f"a result of the kind {record.kind}")
        tables = group_tables(record.rows) if record.kind == "run" else []
        sections.append(Section(name, about, [*_facts(record)], drawn, _every(record), tables))
        for chart in charts:
            slug = re.sub(r"[^a-z0-9_-]+", "-", chart.slug)
            written[output / f"{name}-{slug}.png"] = picture(chart, "png", record.contenders)
    written[output / _PAGE] = page("paceline: " + ", ".join(records), sections).encode()
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    for path, content in written.items():
        with writing(path):
            write_bytes(path, content)
    return [*written]


def _facts(record: Record) -> Iterator[tuple[str, str]]:
    model = record.model or {}
    yield "command", record.command
    yield "made", record.made
    yield "machine", _pairs(record.machine)
    if model:
        yield "model", f"{model.get('name')} ({model.get('fingerprint', '')[:12]})"
    yield "engine", _pairs(record.engine or {})
    yield "versions", _pairs({"paceline": record.paceline, **record.versions})
    if record.suite_sha256:
        yield "prompts (SHA-256)", record.suite_sha256[:12]
    same: dict[str, list[bool]] = {}
    for row in record.rows:
        if "same_tokens" in row.facts:
            same.setdefault(row.contender, []).append(bool(row.facts["same_tokens"]))
    if same:
        whose = "the contender's own plain ones" if record.kind == "peers" else "plain decoding's"
        counts = (f"{name} {sum(found)} of {len(found)}" for name, found in same.items())
        yield f"answers equal to {whose}", "; ".join(counts)
    if record.kind == "run" and record.rows:
        yield "answers", next(notes(record.rows))
    if skipped := record.summary.get("skipped"):
        names = [str(turn.get("case")) for turn in skipped if isinstance(turn, dict)]
        yield "skipped: they do not fit the context", ", ".join(names)


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value)


def _every(record: Record) -> Table:
    """Return all rows as a table, with a column per measure that any of them has."""
    known = {measure for row in record.rows for measure in row.measures}
    columns = [column for column in _COLUMNS if column[0] in known]
    head = ["case", "contender", *(title for _, title, _ in columns), "same"]
    rows = [
        [
            row.case,
            row.contender,
            *(_cell(row, measure, digits) for measure, _, digits in columns),
            _SAME.get(str(row.facts.get("same_tokens")), ""),
        ]
        for row in record.rows
    ]
    return "every case: the median (minimum to maximum) of the rounds", head, rows


def _cell(row: Row, measure: str, digits: int) -> str:
    spread = row.spread(measure)
    return "" if spread is None else spread.rounded(digits)
