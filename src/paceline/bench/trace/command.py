"""`bench trace`: what happened step by step, on a terminal.

Knows traces that were read. The rule: everything that colours say, marks say, too.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from paceline.bench.trace.reader import Recorded, TracedStep, read_trace
from paceline.errors import InvalidRequest
from paceline.tint import GUESSED

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
        from paceline.bench.trace.page import draw

        draw(trace, output)
    return totals(trace), trace


def totals(trace: Recorded) -> dict[str, Any]:
    """For JSON."""
    drafted, accepted = Counter[str](), Counter[str]()
    for step in trace.steps:
        if step.drafted:
            drafted[step.source] += step.drafted
            accepted[step.source] += step.accepted
    steps = trace.steps
    return {
        **{name: trace.about.get(name) for name in ("made", "model", "settings")},
        "ended": trace.result is not None,
        "prompt_tokens": len(trace.prompt),
        "tokens": len(trace.answer),
        "steps": len(steps),
        "tokens_per_step": sum(len(s.tokens) for s in steps) / len(steps) if steps else 0.0,
        "drafted_by": dict(drafted),
        "accepted_by": dict(accepted),
        "prefill_seconds": trace.prefill_seconds,
        "seconds": {
            "draft": sum(step.seconds.draft for step in steps),
            "verify": sum(step.seconds.verify for step in steps),
            "sample": sum(step.seconds.sample for step in steps),
            "whole": sum(step.seconds.whole for step in steps),
        },
    }


def headline(trace: Recorded) -> str:
    """The whole in a line."""
    found = totals(trace)
    drafted, accepted = sum(found["drafted_by"].values()), sum(found["accepted_by"].values())
    guesses = f"{accepted} of {drafted} guesses stood" if drafted else "no guesses"
    took = found["seconds"]["whole"]
    rate = f", {sum(len(s.tokens) for s in trace.steps) / took:.1f} tokens/s" if took else ""
    end = "" if found["ended"] else "; broken off"
    return (
        f"{found['model']}: {found['tokens']} tokens, {found['tokens_per_step']:.2f} a step in "
        f"{found['steps']} steps, {guesses}{rate}{end}"
    )


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


def who(step: TracedStep) -> str:
    """Who proposed, and with how much evidence: a match of so many tokens, or a chance."""
    if not step.proposed:
        return "-"
    if step.chances:
        return f"{step.source} {step.chances[0]:.0%}"
    return f"{step.source} {step.match}" if step.match else step.source


def plain(text: str) -> str:
    """A text in one line."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
