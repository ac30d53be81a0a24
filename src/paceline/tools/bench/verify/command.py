"""`verify`: row invariance and token parity on this machine, as a verdict."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import paceline
from paceline.engines.invariance import Compared
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.options import check
from paceline.storage.report import Report
from paceline.tools.bench.ab_test import drafter_name
from paceline.tools.bench.journal import journal_path
from paceline.tools.bench.verify.checks import (
    Verdict,
    check_rows,
    check_tokens,
    default_drafters,
    verify_cases,
)
from paceline.tools.bench.verify.journal import open_verify_journal
from paceline.tools.suite import Suite, load_suite

_TOGETHER = (1, 2, 1, 3, 1, 5, 1, 8)
"""Sequences per call, in turn."""


def verify(
    load: Callable[[], Model],
    *,
    suite: Path | None,
    max_tokens: int,
    whole: bool,
    drafters: Sequence[str],
    progress: Progress,
    output: Path | None = None,
) -> Report:
    """Check row invariance and token parity; the report passes if the model is exact here.

    `whole` checks all cases, not only enough to cover each pair of their parameters. Without
    `drafters` they are `default_drafters`. Results are journaled beside `output` until it is
    written. Raises InvalidRequest if the suite or a drafter is invalid, or the journal is another
    run's.
    """
    prompts = load_suite(suite)
    for name in drafters:
        check({"drafter": name})
    model = load()
    named = drafters or default_drafters(model)
    cases = verify_cases(whole=whole, drafters=named)
    about = {**_about(model, prompts), "max_tokens": max_tokens, "whole": whole}
    settings = {"drafters": [drafter_name(name) for name in named], "cases": len(cases)}
    verdict = Verdict()
    fixed = {name: each for name, each in {**about, **settings}.items() if name != "date"}
    with open_verify_journal(output, fixed) as journal:
        with progress.task("comparing rows"):
            if journal.rows is None:
                check_rows(model.engine, verdict)
                rows = {name: asdict(each) for name, each in verdict.conditions.items()}
                journal.add_rows(rows)
            else:
                verdict.load_rows(journal.rows)
        label = f"comparing answers ({len(cases)} combinations)"
        with progress.task(label, len(cases), unit="combinations") as reach:
            check_tokens(
                model,
                prompts,
                cases,
                verdict,
                max_tokens=max_tokens,
                together=_TOGETHER,
                watch=reach,
                journal=journal,
            )
    value = {**about, "drafters": settings["drafters"], **verdict.as_dict()}
    return Report(value, verdict.exact, _text(model, verdict), journal=journal_path(output))


def _text(model: Model, verdict: Verdict) -> str:
    rows = verdict.rows
    invariant = "are" if not rows.differing else "are NOT"
    lines = [
        f"rows: {rows.rows} compared, {rows.differing} differ"
        + (f" by up to {rows.largest_difference:.3g}" if rows.differing else ""),
        *(_condition_line(name, each) for name, each in verdict.conditions.items()),
        f"answers: {verdict.answers_compared} compared ({verdict.tokens_compared} tokens), "
        f"{len(verdict.answers_differing)} differ",
        *verdict.answers_differing[:10],
        *_left_out(verdict.prompts_left_out),
        f"verdict: {model.files.name} on the {model.engine.name} engine "
        f"{'is' if verdict.exact else 'is NOT'} exact here: rows {invariant} independent of how "
        "they are computed",
    ]
    return "\n".join(lines)


def _left_out(prompts: Sequence[str]) -> list[str]:
    if not prompts:
        return []
    return [f"prompts that do not fit into the context: {len(prompts)} ({', '.join(prompts)})"]


def _condition_line(name: str, found: Compared) -> str:
    rates = f"{found.differing} of {found.rows} differ"
    picks = f", {found.other_picks} pick another token" if found.differing else ""
    return f"  {name.replace('_', ' ')}: {rates}{picks}"


def _about(model: Model, suite: Suite) -> dict[str, Any]:
    return {
        "paceline": paceline.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model.files.name,
        "fingerprint": model.files.fingerprint,
        "engine": model.engine.describe(),
        "suite_sha256": suite.sha256,
        "prompts": len(suite.prompts),
    }
