"""`bench trace`: what happened step by step, on a terminal.

Knows traces that were read. The rule: everything that colours say, marks say, too.
"""

import sys
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.runtime.highlight import GUESSED
from paceline.tools.bench.trace.reader import Recorded, read_trace
from paceline.tools.bench.trace.summary import headline, plain, totals, who

STOOD, REFUSED, OWN = "█", "░", "▌"
"""In a step's bar: guesses that stood, guesses that did not, and the model's own token."""

_WIDTH = 120


def bench_trace(path: Path, output: Path | None) -> tuple[dict[str, Any], Recorded]:
    """A trace and its totals; drawn to `output` when there is one.

    Raises:
        InvalidRequest: the file is no trace, or the output cannot be written or is of another form.
        MissingExtra: matplotlib is not installed.
    """
    if output is not None and output.suffix not in (".png", ".html"):
        raise InvalidRequest(f"cannot draw {output}; expected a name that ends in .png or .html")
    trace = read_trace(path)
    if output is not None:
        from paceline.tools.bench.trace.page import draw

        draw(trace, output)
    return totals(trace), trace


def show(trace: Recorded) -> None:
    """Print the answer, with what was guessed marked, and a line for each step."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    answer = Text("".join(trace.first_pieces))
    for step in trace.steps:
        answer.append("".join(step.pieces[: step.accepted]), GUESSED)
        answer.append("".join(step.pieces[step.accepted :]))
    console.print(Text(headline(trace)))
    console.print()
    console.print(answer)
    console.print()
    console.print(
        Text(f"{STOOD} a guess that stood   {REFUSED} one that did not   {OWN} own token")
    )
    table = Table(box=None, pad_edge=False)
    for name in ("step", "behind", "ms", "draft"):
        table.add_column(name, justify="right")
    table.add_column("guessed by", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, step in enumerate(trace.steps, start=1):
        table.add_row(
            str(number),
            str(step.context),
            f"{1e3 * step.seconds.whole:.1f}",
            f"{1e3 * step.seconds.draft:.1f}",
            who(step),
            Text.assemble((STOOD * step.stood, "green"), REFUSED * step.refused, OWN * step.own),
            Text.assemble(
                (plain("".join(step.pieces[: step.accepted])), GUESSED),
                plain("".join(step.pieces[step.accepted :])),
            ),
        )
    console.print(table)
