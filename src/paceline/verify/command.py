"""`verify`: row invariance and token parity on this machine, as a verdict."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from time import perf_counter

import paceline
from paceline.drafters import DrafterSpec
from paceline.engines.exact import Compared
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.storage.json_lines import journal_path, resuming
from paceline.storage.report import Report
from paceline.verify.checks import (
    LONG,
    DoneChecks,
    Verdict,
    check_tokens,
    default_drafters,
    verify_cases,
)
from paceline.verify.rows import check_rows, row_checks
from paceline.verify.suite import load_suite

_TOGETHER = (1, 2, 1, 3, 1, 5, 1, 8)
"""Sequences per call, in turn."""

_QUICK_ROWS_SECONDS = 20.0
_QUICK_SECONDS = 45.0
"""Seconds after the start, loading included, when a quick verification begins no further comparison
of rows, and of answers. The last one that was begun comes on top: a minute in all."""


def verify(
    load: Callable[[], Model],
    progress: Progress,
    *,
    max_tokens: int,
    whole: bool = False,
    quick: bool = False,
    drafters: Sequence[str] = (),
    suite: Path | None = None,
    output: Path | None = None,
) -> Report:
    """Check row invariance and token parity; the report passes if the model is exact here.

    `whole` compares every combination, not only enough to cover every pair of their parameters;
    `quick` what fits into a minute. Results are journaled beside `output` until it is written.
    Raises InvalidRequest if the suite or a drafter is invalid, or the journal is another run's.
    """
    started = perf_counter()

    def left(until: float) -> float:
        return until + started - perf_counter() if quick else inf

    prompts = load_suite(suite)
    for name in drafters:
        check({"drafter": name})
    model = load()
    named = drafters or default_drafters(model)
    cases = verify_cases(whole=whole, drafters=named)
    about = {
        "paceline": paceline.__version__,
        "model": model.files.name,
        "fingerprint": model.files.fingerprint,
        "engine": model.engine.describe(),
        "suite_sha256": prompts.sha256,
        "prompts": len(prompts.prompts),
        "max_tokens": max_tokens,
        "whole": whole,
        "quick": quick,
        "drafters": [DrafterSpec.parse(name).without_folders for name in named],
    }
    verdict = Verdict()
    with resuming(output, {**about, "cases": len(cases)}) as journal:
        checks = len(row_checks(model.engine))
        with progress.task("comparing rows", checks, unit="contexts") as reach:
            rows, compared = journal.get("rows", DoneChecks), journal.get("conditions", _Conditions)
            if rows is None or compared is None:
                seconds = left(_QUICK_ROWS_SECONDS)
                rows = check_rows(model.engine, verdict, seconds=seconds, watch=reach)
                measured = {name: asdict(compared) for name, compared in verdict.conditions.items()}
                journal.add("rows", rows)
                journal.add("conditions", measured)
            else:
                verdict.conditions = compared
        label = f"comparing answers ({len(cases)} combinations)"
        with progress.task(label, len(cases), unit="combinations") as reach:
            answers = check_tokens(
                model,
                prompts,
                cases,
                verdict,
                max_tokens=max_tokens,
                journal=journal,
                long=LONG,
                together=_TOGETHER,
                watch=reach,
                seconds=left(_QUICK_SECONDS),
            )
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    value = {**about, "date": date, **verdict.as_dict()}
    text = _text(model, verdict)
    if quick:
        value["parts"] = {"contexts": rows._asdict(), "combinations": answers._asdict()}
        text = f"{text}\n{_quick_line(rows, answers)}"
    return Report(value, verdict.exact, text, journal=journal_path(output))


_Conditions = dict[str, Compared]


def _text(model: Model, verdict: Verdict) -> str:
    rows, left_out = verdict.rows, verdict.prompts_left_out
    invariant = "are" if not rows.differing else "are NOT"
    lines = [
        f"rows: {rows.rows} compared, {rows.differing} differ"
        + (f" by up to {rows.largest_difference:.3g}" if rows.differing else ""),
        *(_condition_line(name, compared) for name, compared in verdict.conditions.items()),
        f"answers: {verdict.answers_compared} compared ({verdict.tokens_compared} tokens), "
        f"{len(verdict.answers_differing)} differ",
        *verdict.answers_differing[:10],
        *(
            [f"prompts that do not fit into the context: {len(left_out)} ({', '.join(left_out)})"]
            if left_out
            else []
        ),
        f"verdict: {model.files.name} on the {model.engine.name} engine "
        f"{'is' if verdict.exact else 'is NOT'} exact here: rows {invariant} independent of how "
        "they are computed",
    ]
    return "\n".join(lines)


def _quick_line(rows: DoneChecks, answers: DoneChecks) -> str:
    minutes = (rows.whole_seconds + answers.whole_seconds) / 60
    return (
        f"quick: {rows} contexts and {answers} combinations were compared; all of them take about "
        f"{max(minutes, 1):.0f} min (without --quick)"
    )


def _condition_line(name: str, compared: Compared) -> str:
    rates = f"{compared.differing} of {compared.rows} differ"
    picks = f", {compared.other_picks} pick another token" if compared.differing else ""
    return f"  {name.replace('_', ' ')}: {rates}{picks}"
