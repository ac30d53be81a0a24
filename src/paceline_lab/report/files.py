"""Writes records as charts, and as one self-contained page of HTML with tables of their values.

Invariants: the same results give the same bytes, so the output has no current time and no paths;
and all text of a result is escaped.
"""

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.storage.files import write_bytes, writing
from paceline.storage.report import Table
from paceline_lab.bench.record import Record, Row, read_record
from paceline_lab.bench.summary import group_tables, notes
from paceline_lab.report.charts import Chart, record_charts
from paceline_lab.report.drawing import picture

_STYLE = """
:root { color-scheme: light dark; --line: #8888; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { border-top: 2px solid var(--line); padding-top: 1rem; }
h3 { margin: 0 0 .5rem; font-size: 1.05rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 2rem 0; display: grid; gap: 1rem; align-items: start;
  grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); }
figure > img { width: 100%; background: #fff; border-radius: 6px; }
.scrolls { overflow: auto; max-height: 40rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--soft);
  vertical-align: top; }
thead th { border-bottom-color: var(--line); }
tbody th { font-weight: normal; }
th:first-child, .every :is(th, td):nth-child(2) { text-align: left; }
caption { text-align: left; font-style: italic; padding-bottom: .3rem; }
.every { max-height: none; }
summary { cursor: pointer; }
@media (max-width: 50rem) { figure { grid-template-columns: 1fr; } }
@media print { figure { break-inside: avoid; } .scrolls { max-height: none; } }
"""
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


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    about: str
    """A description of the measurement, in one sentence."""
    facts: Sequence[tuple[str, str]]
    charts: Sequence[tuple[Chart, bytes]]
    """Charts with their pictures as SVG."""
    every: Table
    """A table of all rows."""
    tables: Sequence[Table] = ()
    """Tables of aggregates."""


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the HTML of the page, which needs no other file."""
    links = "".join(
        f'<li><a href="#s{number}">{escape(section.name)}</a>: {escape(section.about)}</li>\n'
        for number, section in enumerate(sections, start=1)
    )
    body = "\n".join(
        "\n".join(_section(f"s{number}", section))
        for number, section in enumerate(sections, start=1)
    )
    main = f"""<h1>{escape(title)}</h1>
<nav aria-label="Results"><ul>
{links}</ul></nav>
<main>
{body}
</main>"""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{main}
</body>
</html>
"""


def _section(anchor: str, section: Section) -> Iterator[str]:
    yield f'<section aria-labelledby="{anchor}">'
    yield f'<h2 id="{anchor}">{escape(section.name)}</h2>'
    yield f"<p>{escape(section.about)}</p>"
    facts = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in section.facts)
    yield f"<dl>{''.join(facts)}</dl>"
    for table in section.tables:
        yield _scrolling(table)
    for chart, drawn in section.charts:
        data = b64encode(drawn).decode()
        alt = f"Chart: {chart.title}. The figures are in the table next to it."
        yield "<figure>"
        yield f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'
        yield f"<figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.note)}</p>"
        yield f"{_scrolling(chart.table)}</figcaption></figure>"
    title, _, rows = section.every
    yield f"<details><summary>{escape(title)} ({len(rows)})</summary>"
    yield f"{_scrolling(section.every, 'every')}</details>"
    yield "</section>"


def _scrolling(table: Table, more: str = "") -> str:
    """Return a table in a region that has keyboard focus, so that it can be scrolled."""
    title, head, rows = table
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scrolls {more}" role="region" tabindex="0" aria-label="{escape(title)}">'
        f"<table><caption>{escape(title)}</caption><thead><tr>{top}</tr></thead><tbody>\n"
        f"{lines}\n</tbody></table></div>"
    )


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
