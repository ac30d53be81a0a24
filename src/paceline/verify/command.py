"""`verify`: row invariance and token parity on this machine, as a verdict."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from time import perf_counter
from typing import Any

import paceline
from paceline.drafters import DrafterSpec
from paceline.engines.invariance import Compared
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.storage.json_lines import journal_path
from paceline.storage.report import Report
from paceline.verify.arguments import Verification
from paceline.verify.checks import (
    LONG,
    Part,
    Verdict,
    check_tokens,
    default_drafters,
    verify_cases,
)
from paceline.verify.journal import open_verify_journal
from paceline.verify.rows import check_rows, row_checks
from paceline.verify.suite import Suite, load_suite

_TOGETHER = (1, 2, 1, 3, 1, 5, 1, 8)
"""Sequences per call, in turn."""

_QUICK_ROWS_SECONDS = 20.0
_QUICK_SECONDS = 45.0
"""Seconds after the start, loading included, when a quick verification begins no further comparison
of rows, and of answers. The last one that was begun comes on top: a minute in all."""


def verify(load: Callable[[], Model], checked: Verification, progress: Progress) -> Report:
    """Check row invariance and token parity; the report passes if the model is exact here.

    Raises InvalidRequest if the suite or a drafter is invalid, or the journal is another run's.
    """
    started = perf_counter()

    def left(until: float) -> float:
        return until + started - perf_counter() if checked.quick else inf

    prompts = load_suite(checked.suite)
    for name in checked.drafters:
        check({"drafter": name})
    model = load()
    named = checked.drafters or default_drafters(model)
    cases = verify_cases(whole=checked.whole, drafters=named)
    about = {
        **_about(model, prompts),
        "max_tokens": checked.max_tokens,
        "whole": checked.whole,
        "quick": checked.quick,
    }
    without_folders = [DrafterSpec.parse(name).without_folders for name in named]
    settings = {"drafters": without_folders, "cases": len(cases)}
    verdict = Verdict()
    fixed = {name: fact for name, fact in {**about, **settings}.items() if name != "date"}
    with open_verify_journal(checked.output, fixed) as journal:
        checks = len(row_checks(model.engine))
        with progress.task("comparing rows", checks, unit="contexts") as reach:
            if journal.rows is None:
                seconds = left(_QUICK_ROWS_SECONDS)
                rows = check_rows(model.engine, verdict, seconds=seconds, watch=reach)
                measured = {name: asdict(compared) for name, compared in verdict.conditions.items()}
                journal.add_rows({"part": rows, "conditions": measured})
            else:
                rows = Part(*journal.rows["part"])
                verdict.load_rows(journal.rows["conditions"])
        label = f"comparing answers ({len(cases)} combinations)"
        with progress.task(label, len(cases), unit="combinations") as reach:
            answers = check_tokens(
                model,
                prompts,
                cases,
                verdict,
                max_tokens=checked.max_tokens,
                long=LONG,
                together=_TOGETHER,
                watch=reach,
                journal=journal,
                seconds=left(_QUICK_SECONDS),
            )
    parts = {"contexts": rows, "combinations": answers}
    value = {
        **about,
        "drafters": settings["drafters"],
        **verdict.as_dict(),
        **(
            {"parts": {name: part._asdict() for name, part in parts.items()}}
            if checked.quick
            else {}
        ),
    }
    text = _text(model, verdict)
    if checked.quick:
        text = f"{text}\n{_quick_line(rows, answers)}"
    return Report(value, verdict.exact, text, journal=journal_path(checked.output))


def _text(model: Model, verdict: Verdict) -> str:
    rows = verdict.rows
    invariant = "are" if not rows.differing else "are NOT"
    lines = [
        f"rows: {rows.rows} compared, {rows.differing} differ"
        + (f" by up to {rows.largest_difference:.3g}" if rows.differing else ""),
        *(_condition_line(name, compared) for name, compared in verdict.conditions.items()),
        f"answers: {verdict.answers_compared} compared ({verdict.tokens_compared} tokens), "
        f"{len(verdict.answers_differing)} differ",
        *verdict.answers_differing[:10],
        *_left_out(verdict.prompts_left_out),
        f"verdict: {model.files.name} on the {model.engine.name} engine "
        f"{'is' if verdict.exact else 'is NOT'} exact here: rows {invariant} independent of how "
        "they are computed",
    ]
    return "\n".join(lines)


def _quick_line(rows: Part, answers: Part) -> str:
    minutes = (rows.whole_seconds + answers.whole_seconds) / 60
    return (
        f"quick: {rows} contexts and {answers} combinations were compared; all of them take about "
        f"{max(minutes, 1):.0f} min (without --quick)"
    )


def _left_out(prompts: Sequence[str]) -> list[str]:
    if not prompts:
        return []
    return [f"prompts that do not fit into the context: {len(prompts)} ({', '.join(prompts)})"]


def _condition_line(name: str, compared: Compared) -> str:
    rates = f"{compared.differing} of {compared.rows} differ"
    picks = f", {compared.other_picks} pick another token" if compared.differing else ""
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
