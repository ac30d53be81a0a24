"""A trace in one line, and in totals."""

from collections import Counter
from typing import Any

from paceline.tools.bench.trace.reader import Recorded, TracedStep


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
