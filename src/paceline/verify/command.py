"""`verify`: row invariance and token parity on this machine, as a verdict."""

import datetime
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter

import paceline
from paceline.drafters import DrafterSpec
from paceline.engines.exact import Compared
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.storage.report import Report
from paceline.verify.checks import (
    Check,
    Verdict,
    default_drafters,
    row_checks,
    run_checks,
    token_checks,
    verify_cases,
)
from paceline.verify.suite import load_suite

_QUICK_ROWS_SECONDS = 20.0
_QUICK_SECONDS = 45.0
"""Seconds after the start, loading included, when a quick verification begins no further comparison
of rows, and of answers. The last one that was begun comes on top: a minute in all."""


def verify(
    load: Callable[[], Model],
    progress: Progress,
    *,
    max_tokens: int,
    quick: bool = False,
    drafters: Sequence[str] = (),
    suite: Path | None = None,
) -> Report:
    """Check row invariance and token parity; the report passes if the model is exact here.

    `quick` compares what fits into a minute. Raises InvalidRequest if the suite or a drafter is
    invalid.
    """
    started = perf_counter()
    prompts = load_suite(suite)
    for name in drafters:
        check({"drafter": name})
    model = load()
    named = drafters or default_drafters(model)
    verdict = Verdict()
    parts: dict[str, dict[str, float]] = {}

    def run(what: str, unit: str, checks: Sequence[Check], quick_seconds: float) -> None:
        began = perf_counter()
        with progress.task(f"comparing {what}", len(checks), unit=unit) as reach:
            done = run_checks(checks, reach, started + quick_seconds if quick else inf)
        parts[unit] = {"done": done, "of": len(checks), "seconds": perf_counter() - began}

    rows = [partial(model.call, check) for check in row_checks(model.engine, verdict)]
    run("rows", "contexts", rows, _QUICK_ROWS_SECONDS)
    cases = verify_cases(named)
    answers = token_checks(model, prompts, cases, verdict, max_tokens=max_tokens)
    run("answers", "combinations", answers, _QUICK_SECONDS)
    value = {
        "paceline": paceline.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model.files.name,
        "fingerprint": model.files.fingerprint,
        "engine": model.engine.describe(),
        "suite_sha256": prompts.sha256,
        "prompts": len(prompts.prompts),
        "max_tokens": max_tokens,
        "quick": quick,
        "drafters": [DrafterSpec.parse(name).without_folders for name in named],
        "parts": parts,
        **verdict.as_dict(),
    }
    text = _text(model, verdict)
    if quick:
        compared = [f"{part['done']} of {part['of']} {unit}" for unit, part in parts.items()]
        seconds = sum(
            part["seconds"] * part["of"] / max(part["done"], 1) for part in parts.values()
        )
        text += (
            f"\nquick: {' and '.join(compared)} were compared; all of them take about "
            f"{max(seconds / 60, 1):.0f} min (without --quick)"
        )
    return Report(value, verdict.exact, text)


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


def _condition_line(name: str, compared: Compared) -> str:
    rates = f"{compared.differing} of {compared.rows} differ"
    picks = f", {compared.other_picks} pick another token" if compared.differing else ""
    return f"  {name.replace('_', ' ')}: {rates}{picks}"
