"""`bench trace`: one answer step by step, as `generate --trace` wrote it."""

from collections import Counter
from pathlib import Path
from typing import Any

from paceline.storage.report import Report, Table
from paceline_lab.trace.reader import RecordedTrace, TracedStep, read_trace

ACCEPTED, REJECTED, BONUS = "█", "░", "▌"
"""Characters of a step's bar, one per token."""


def bench_trace(path: Path) -> Report:
    """A trace and its totals. Raises InvalidRequest if the file is no trace."""
    trace = read_trace(path)
    text = "".join([*trace.first_pieces, *(piece for step in trace.steps for piece in step.pieces)])
    return Report(totals(trace), text=f"{headline(trace)}\n\n{text}", tables=[step_table(trace)])


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
