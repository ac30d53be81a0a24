"""A self-contained page of HTML: inline charts, next to tables of their values.

Invariant: all text of a result is escaped.
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from paceline.storage.report import Table
from paceline_lab.report.charts import Chart


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
    for chart, picture in section.charts:
        data = b64encode(picture).decode()
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
