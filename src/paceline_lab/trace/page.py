"""A trace as a self-contained page of HTML: the answer, and a table of its steps.

Invariants: all text of a trace is escaped; the same trace gives the same bytes.
"""

import json
from collections.abc import Iterator
from html import escape

from paceline.storage.report import Table
from paceline_lab.report.page import definitions, document, scrolling
from paceline_lab.trace.reader import RecordedTrace

_HUES = (210, 20, 160, 320, 45, 190)

_STYLE = """
.answer { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: 1rem; font-family: ui-monospace, monospace; font-size: .9rem; }
u { text-decoration-thickness: 2px; text-underline-offset: 3px; border-radius: 2px;
  background: hsl(var(--hue) 80% 50% / .22); }
.scrolls { max-height: none; }
td { white-space: nowrap; }
td:nth-last-child(-n + 2) { text-align: left; white-space: pre-wrap;
  font-family: ui-monospace, monospace; }
"""


def page(trace: RecordedTrace, headline: str, steps: Table) -> str:
    """HTML of the page, which needs no other file."""
    names = list(dict.fromkeys(step.source for step in trace.steps if step.stood))
    hues = {name: _HUES[number % len(_HUES)] for number, name in enumerate(names)}
    key = " ".join(_tinted(hue, name) for name, hue in hues.items())
    body = f"""<h1>{escape(headline)}</h1>
{definitions([*_facts(trace)])}
<h2>The answer</h2>
<p>Accepted draft tokens are underlined: {key or "none"}. The rest are bonus tokens.
Point at a word to see its step.</p>
<div class="answer">{"".join(_answer(trace, hues))}</div>
<h2>Step by step</h2>
{scrolling(steps)}"""
    return document("paceline: a trace", body, _STYLE)


def _facts(trace: RecordedTrace) -> Iterator[tuple[str, str]]:
    yield "made", str(trace.about.get("made", ""))
    yield "settings", json.dumps(trace.about["settings"], ensure_ascii=False)
    for name in ("engine", "drafter", "policy", "finish_reason"):
        if trace.result is not None and name in trace.result:
            yield name.replace("_", " "), str(trace.result[name])


def _answer(trace: RecordedTrace, hues: dict[str, int]) -> Iterator[str]:
    yield escape("".join(trace.first_pieces))
    for number, step in enumerate(trace.steps, start=1):
        if accepted := "".join(step.pieces[: step.stood]):
            yield _tinted(hues[step.source], accepted, f"step {number}: {step.source}")
        yield escape("".join(step.pieces[step.stood :]))


def _tinted(hue: int, text: str, title: str = "") -> str:
    return f'<u style="--hue: {hue}" title="{escape(title, quote=True)}">{escape(text)}</u>'
