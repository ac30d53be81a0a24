"""A trace as a self-contained page of HTML, or as a picture.

Invariants: all text of a trace is escaped; the same trace gives the same bytes.
"""

import json
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from pathlib import Path

from paceline.storage.files import write_bytes, writing
from paceline_lab.trace.picture import picture, sources
from paceline_lab.trace.reader import RecordedTrace, TracedStep
from paceline_lab.trace.summary import draft_source, escaped, headline

_HUES = (210, 20, 160, 320, 45, 190)

_STYLE = """
:root { color-scheme: light dark; --line: #8888; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: 1rem; font-family: ui-monospace, monospace; font-size: .9rem; }
u { text-decoration-thickness: 2px; text-underline-offset: 3px; border-radius: 2px; }
u[class] { background: hsl(var(--hue) 80% 50% / .22); }
s { opacity: .6; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
img { max-width: none; background: #fff; border-radius: 6px; }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--soft);
  vertical-align: top; white-space: nowrap; }
th { border-bottom-color: var(--line); }
.text { text-align: left; white-space: pre-wrap; font-family: ui-monospace, monospace; }
"""


def draw(trace: RecordedTrace, output: Path) -> None:
    """Write the picture to a `.png`, or the page to any other file.

    Raises:
        InvalidRequest: the file cannot be written.
        MissingExtra: matplotlib is not installed.
    """
    if output.suffix == ".png":
        content = picture(trace, headline(trace), "png")
    else:
        content = page(trace).encode()
    with writing(output):
        write_bytes(output, content)


def page(trace: RecordedTrace) -> str:
    """A self-contained page of HTML: answer, picture, and a table of the steps."""
    names = sources(trace.steps)
    hues = "".join(
        f".s{number} {{ --hue: {_HUES[number % len(_HUES)]} }}\n" for number in range(len(names))
    )
    key = "".join(f'<u class="s{n}">{escape(name)}</u> ' for n, name in enumerate(names))
    facts = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in _facts(trace))
    chart = b64encode(picture(trace, "", "svg")).decode() if trace.steps else ""
    alt = "Chart: tokens and time of each step. The figures are in the table below."
    image = f'<img alt="{alt}" src="data:image/svg+xml;base64,{chart}">' if chart else ""
    lines = "\n".join(_row(number, step) for number, step in enumerate(trace.steps, start=1))
    head = "".join(
        f'<th scope="col"{extra}>{name}</th>'
        for name, extra in (
            *((name, "") for name in ("step", "context", "rows", "ms", "draft ms")),
            *((name, ' class="text"') for name in ("drafted by", "draft", "new tokens")),
        )
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>paceline: a trace</title>
<style>{_STYLE}{hues}</style>
</head>
<body>
<h1>{escape(headline(trace))}</h1>
<dl>{facts}</dl>
<h2>The answer</h2>
<p>Accepted draft tokens are underlined: {key or "none"}. The rest are bonus tokens.
Point at a word to see its step.</p>
<div class="answer">{"".join(_answer(trace, names))}</div>
<h2>Step by step</h2>
<div class="scrolls" tabindex="0">{image}</div>
<p>In the table, accepted draft tokens are underlined and rejected ones are struck out.</p>
<div class="scrolls" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>
{lines}
</tbody></table></div>
</body>
</html>
"""


def _facts(trace: RecordedTrace) -> Iterator[tuple[str, str]]:
    yield "made", str(trace.about.get("made", ""))
    yield "settings", json.dumps(trace.about["settings"], ensure_ascii=False)
    for name in ("engine", "drafter", "policy", "finish_reason"):
        if trace.result is not None and name in trace.result:
            yield name.replace("_", " "), str(trace.result[name])


def _answer(trace: RecordedTrace, names: list[str]) -> Iterator[str]:
    yield escape("".join(trace.first_pieces))
    for number, step in enumerate(trace.steps, start=1):
        if accepted := step.accepted_text:
            title = escape(f"step {number}: {draft_source(step)}", quote=True)
            yield f'<u class="s{names.index(step.source)}" title="{title}">{escape(accepted)}</u>'
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
    return (
        "<tr>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "".join(f'<td class="text">{text}</td>' for text in texts)
        + "</tr>"
    )


def _marked(tag: str, text: str) -> str:
    return f"<{tag}>{escape(escaped(text))}</{tag}>" if text else ""
