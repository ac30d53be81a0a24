"""`bench trace`: one answer step by step, on a terminal or as a page.

Invariant: everything that colours show, characters show, too.
"""

import sys
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.runtime.highlight import ACCEPTED_STYLE
from paceline.storage.files import write_bytes, writing
from paceline_lab.trace.page import page
from paceline_lab.trace.reader import RecordedTrace, read_trace
from paceline_lab.trace.summary import draft_source, escaped, headline, totals

ACCEPTED, REJECTED, BONUS = "█", "░", "▌"
"""Characters of a step's bar, one per token."""

_WIDTH = 120


def bench_trace(path: Path, output: Path | None) -> tuple[dict[str, Any], RecordedTrace]:
    """A trace and its totals; a page of it in `output` if there is one.

    Raises InvalidRequest if the file is no trace, or the output cannot be written or has another
    suffix.
    """
    if output is not None and output.suffix != ".html":
        raise InvalidRequest(f"cannot draw {output}; expected a name that ends in .html")
    trace = read_trace(path)
    if output is not None:
        with writing(output):
            write_bytes(output, page(trace).encode())
    return totals(trace), trace


def show(trace: RecordedTrace) -> None:
    """Print the answer, with accepted draft tokens marked, and a line per step."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    answer = Text("".join(trace.first_pieces))
    for step in trace.steps:
        answer.append("".join(step.pieces[: step.accepted]), ACCEPTED_STYLE)
        answer.append("".join(step.pieces[step.accepted :]))
    console.print(Text(headline(trace)))
    console.print()
    console.print(answer)
    console.print()
    legend = f"{ACCEPTED} accepted draft token   {REJECTED} rejected   {BONUS} bonus token"
    console.print(Text(legend))
    table = Table(box=None, pad_edge=False)
    for name in ("step", "context", "ms", "draft"):
        table.add_column(name, justify="right")
    table.add_column("drafted by", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, step in enumerate(trace.steps, start=1):
        table.add_row(
            str(number),
            str(step.context),
            f"{1e3 * step.seconds.whole:.1f}",
            f"{1e3 * step.seconds.draft:.1f}",
            draft_source(step),
            Text.assemble(
                (ACCEPTED * step.stood, "green"), REJECTED * step.rejected, BONUS * step.bonus
            ),
            Text.assemble(
                (escaped("".join(step.pieces[: step.accepted])), ACCEPTED_STYLE),
                escaped("".join(step.pieces[step.accepted :])),
            ),
        )
    console.print(table)
