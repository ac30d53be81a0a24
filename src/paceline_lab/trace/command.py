"""`bench trace`: one answer step by step, on a terminal or as a page."""

from collections import Counter
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.storage.files import write_bytes, writing
from paceline.storage.report import Report, Table
from paceline_lab.trace.page import page
from paceline_lab.trace.reader import RecordedTrace, TracedStep, read_trace

ACCEPTED, REJECTED, BONUS = "█", "░", "▌"
"""Characters of a step's bar, one per token."""


def bench_trace(path: Path, output: Path | None) -> Report:
    """A trace and its totals; a page of it in `output` if there is one.

    Raises InvalidRequest if the file is no trace, or the output cannot be written or has another
    suffix.
    """
    if output is not None and output.suffix != ".html":
        raise InvalidRequest(f"cannot draw {output}; expected a name that ends in .html")
    trace = read_trace(path)
    value, table = totals(trace), step_table(trace)
    if output is not None:
        with writing(output):
            write_bytes(output, page(trace, headline(trace), table).encode())
        return Report(value, text=str(output))
    text = "".join([*trace.first_pieces, *(piece for step in trace.steps for piece in step.pieces)])
    return Report(value, text=f"{headline(trace)}\n\n{text}", tables=[table])


def totals(trace: RecordedTrace) -> dict[str, Any]:
    """Sums over the steps, as JSON."""
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
            name: sum(getattr(step.seconds, name) for step in steps)
            for name in ("draft", "verify", "sample", "whole")
        },
    }


def headline(trace: RecordedTrace) -> str:
    """The totals in one line."""
    sums = totals(trace)
    drafted, accepted = sum(sums["drafted_by"].values()), sum(sums["accepted_by"].values())
    drafts = f"{accepted} of {drafted} draft tokens accepted" if drafted else "no drafts"
    took = sums["seconds"]["whole"]
    rate = f", {sum(len(s.tokens) for s in trace.steps) / took:.1f} tokens/s" if took else ""
    end = "" if sums["ended"] else "; interrupted"
    return (
        f"{sums['model']}: {sums['tokens']} tokens, {sums['tokens_per_step']:.2f} a step in "
        f"{sums['steps']} steps, {drafts}{rate}{end}"
    )


def step_table(trace: RecordedTrace) -> Table:
    """A line per step: where it was, what it took, its draft, and its new tokens as a bar."""
    head = ("step", "context", "ms", "draft ms", "drafted by", "tokens", "draft", "new text")
    rows = [
        [
            str(number),
            str(step.context),
            f"{1e3 * step.seconds.whole:.1f}",
            f"{1e3 * step.seconds.draft:.2f}",
            draft_source(step),
            ACCEPTED * step.stood + REJECTED * step.rejected + BONUS * step.bonus,
            escaped(step.guess),
            escaped("".join(step.pieces)),
        ]
        for number, step in enumerate(trace.steps, start=1)
    ]
    legend = f"{ACCEPTED} accepted draft token   {REJECTED} rejected   {BONUS} bonus token"
    return legend, head, rows


def draft_source(step: TracedStep) -> str:
    """Source of the draft with its evidence: length of the match, or first token's probability."""
    if not step.proposed:
        return "-"
    if step.chances:
        return f"{step.source} {step.chances[0]:.0%}"
    return f"{step.source} {step.match}" if step.match else step.source


def escaped(text: str) -> str:
    """The text on one line, with tabs and line breaks escaped."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
