"""Writes records as charts, and as one self-contained page of HTML.

Invariant: the same results give the same bytes, so the output has no current time and no paths.
"""

import re
from collections.abc import Iterator, Sequence
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


def write_report(paths: Sequence[Path], output: Path) -> list[Path]:
    """Draw results of `bench ... --output`; the paths written, the page first.

    The output is a folder for the page and every chart as PNG, or the page alone if its name ends
    in `.html`. Raises InvalidRequest if a file is no result, or the output cannot be written, and
    MissingExtra if matplotlib is not installed.
    """
    records = dict(zip(_names(paths), map(read_record, paths), strict=True))
    sections, pictures = [], {}
    alone = output.suffix == ".html"
    for name, record in records.items():
        charts = record_charts(record)
        drawn = [(chart, picture(chart, "svg", record.contenders)) for chart in charts]
        about = _ABOUT.get(record.kind, f"a result of the kind {record.kind}")
        tables = group_tables(record.rows) if record.kind == "run" else []
        sections.append(Section(name, about, [*_facts(record)], drawn, _every(record), tables))
        if not alone:
            for chart in charts:
                slug = re.sub(r"[^a-z0-9_-]+", "-", chart.slug)
                pictures[f"{name}-{slug}.png"] = picture(chart, "png", record.contenders)
    text = page("paceline: " + ", ".join(records), sections)
    if alone:
        written = {output: text.encode()}
    else:
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
        written = {output / _PAGE: text.encode()}
        written |= {output / name: content for name, content in pictures.items()}
    for path, content in written.items():
        with writing(path):
            write_bytes(path, content)
    return [*written]


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of the results: those of their files, numbered if they are the same.

    Raises InvalidRequest if a file is named twice.
    """
    names: list[str] = []
    if len(set(paths)) < len(paths):
        raise InvalidRequest("a result is named twice; name each once")
    for path in paths:
        name, number = path.stem, 2
        while name in names:
            name, number = f"{path.stem}-{number}", number + 1
        names.append(name)
    return names


def _facts(record: Record) -> Iterator[tuple[str, str]]:
    model, engine = record.model or {}, record.engine or {}
    yield "command", record.command
    yield "made", record.made
    yield "machine", ", ".join(f"{name} {value}" for name, value in record.machine.items())
    if model:
        yield "model", f"{model.get('name')} ({model.get('fingerprint', '')[:12]})"
    yield "engine", ", ".join(f"{name} {value}" for name, value in engine.items() if value)
    yield (
        "versions",
        ", ".join(
            f"{name} {version}"
            for name, version in {"paceline": record.paceline, **record.versions}.items()
            if version
        ),
    )
    if record.suite_sha256:
        yield "prompts (SHA-256)", record.suite_sha256[:12]
    if any("same_tokens" in row.facts for row in record.rows):
        whose = "the contender's own plain ones" if record.kind == "peers" else "plain decoding's"
        yield f"answers equal to {whose}", "; ".join(_same(record))
    if record.kind == "run" and record.rows:
        yield "answers", next(notes(record.rows))
    if skipped := record.summary.get("skipped"):
        names = [str(turn.get("case")) for turn in skipped if isinstance(turn, dict)]
        yield "skipped: they do not fit the context", ", ".join(names)


def _same(record: Record) -> Iterator[str]:
    """By contender, the number of cases in which its tokens equal plain decoding's."""
    for name in record.contenders:
        verdicts = [
            row.facts["same_tokens"]
            for row in record.rows
            if row.contender == name and "same_tokens" in row.facts
        ]
        if verdicts:
            yield f"{name} {sum(map(bool, verdicts))} of {len(verdicts)}"


def _every(record: Record) -> Table:
    """All rows, with a column per measure that any of them has."""
    columns = [
        column for column in _COLUMNS if any(column[0] in row.measures for row in record.rows)
    ]
    same = any("same_tokens" in row.facts for row in record.rows)
    head = ["case", "contender", *(title for _, title, _ in columns), *(["same"] if same else [])]
    rows = [
        [
            row.case,
            row.contender,
            *(_cell(row, measure, digits) for measure, _, digits in columns),
            *([_yes(row.facts.get("same_tokens"))] if same else []),
        ]
        for row in record.rows
    ]
    return "every case: the median (least to most) of the rounds", head, rows


def _cell(row: Row, measure: str, digits: int) -> str:
    spread = row.spread(measure)
    return "" if spread is None else spread.rounded(digits)


def _yes(value: object) -> str:
    return "" if value is None else "yes" if value else "NO"
