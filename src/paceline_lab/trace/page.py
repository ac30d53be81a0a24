"""A trace as a self-contained page of HTML: the answer, and a table of its steps.

Invariants: all text of a trace is escaped; the same trace gives the same bytes.
"""

import json
from collections.abc import Iterator
from html import escape

from paceline_lab.report.page import document
from paceline_lab.trace.reader import RecordedTrace, TracedStep
from paceline_lab.trace.summary import draft_source, escaped, headline

_HUES = (210, 20, 160, 320, 45, 190)

_STYLE = """
.answer { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: 1rem; font-family: ui-monospace, monospace; font-size: .9rem; }
u { text-decoration-thickness: 2px; text-underline-offset: 3px; border-radius: 2px; }
u[style] { background: hsl(var(--hue) 80% 50% / .22); }
s { opacity: .6; }
.scrolls { max-height: none; }
td { white-space: nowrap; }
td.text { text-align: left; white-space: pre-wrap; font-family: ui-monospace, monospace; }
"""

_COLUMNS = ("step", "context", "rows", "ms", "draft ms", "drafted by", "draft", "new tokens")


def page(trace: RecordedTrace) -> str:
    """HTML of the page, which needs no other file."""
    names = list(dict.fromkeys(step.source for step in trace.steps if step.stood))
    hues = {name: _HUES[number % len(_HUES)] for number, name in enumerate(names)}
    key = " ".join(_tinted(hue, name) for name, hue in hues.items())
    facts = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in _facts(trace))
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    lines = "\n".join(_row(number, step) for number, step in enumerate(trace.steps, start=1))
    body = f"""<h1>{escape(headline(trace))}</h1>
<dl>{facts}</dl>
<h2>The answer</h2>
<p>Accepted draft tokens are underlined: {key or "none"}. The rest are bonus tokens.
Point at a word to see its step.</p>
<div class="answer">{"".join(_answer(trace, hues))}</div>
<h2>Step by step</h2>
<p>Accepted draft tokens are underlined and rejected ones are struck out.</p>
<div class="scrolls" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>
{lines}
</tbody></table></div>"""
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
        if accepted := step.accepted_text:
            yield _tinted(hues[step.source], accepted, f"step {number}: {draft_source(step)}")
        yield escape(step.bonus_text)


def _row(number: int, step: TracedStep) -> str:
    cells = [
        str(number),
        str(step.context),
        str(step.rows),
        f"{1e3 * step.seconds.whole:.1f}",
        f"{1e3 * step.seconds.draft:.2f}",
    ]
    # A draft is split only where its text agrees with the answer's, never inside a character.
    accepted = step.accepted_text if step.guess.startswith(step.accepted_text) else ""
    rejected = step.guess[len(accepted) :] if step.rejected else ""
    texts = [
        escape(draft_source(step)),
        _marked("u", accepted) + _marked("s", rejected),
        _marked("u", step.accepted_text) + escape(escaped(step.bonus_text)),
    ]
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr>{numbers}" + "".join(f'<td class="text">{text}</td>' for text in texts) + "</tr>"


def _marked(tag: str, text: str) -> str:
    return f"<{tag}>{escape(escaped(text))}</{tag}>" if text else ""


def _tinted(hue: int, text: str, title: str = "") -> str:
    return f'<u style="--hue: {hue}" title="{escape(title, quote=True)}">{escape(text)}</u>'
