"""What the commands `verify` and `plan` do; printing is the command line's."""

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
from paceline.tools.bench.ab_test import called
from paceline.tools.bench.journal import journal_path
from paceline.tools.bench.verify.checks import Verdict, cases, check_rows, check_tokens, drafters_of
from paceline.tools.bench.verify.journal import verifying
from paceline.tools.suite import Suite, load_suite


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
    """Row invariance and token parity, with a verdict. `load` opens the model.

    `drafters` are those to check; none named: all that the model has. What has been checked is kept
    beside `output` until it is written, so that a stopped verification goes on where it was.

    Raises:
        InvalidRequest: the suite or a drafter cannot be used, or the journal is another's.
    """
    prompts = load_suite(suite)
    for name in drafters:
        check({"drafter": name})
    model = load()
    named = drafters or drafters_of(model)
    chosen = cases(whole=whole, chosen_from=named)
    about = {**_about(model, prompts), "max_tokens": max_tokens, "whole": whole}
    settings = {"drafters": [called(name) for name in named], "cases": len(chosen)}
    verdict = Verdict()
    fixed = {name: each for name, each in {**about, **settings}.items() if name != "date"}
    with verifying(output, fixed) as kept:
        with progress.task("comparing rows"):
            if kept.rows is None:
                check_rows(model.engine, verdict)
                kept.add_rows({name: asdict(each) for name, each in verdict.conditions.items()})
            else:
                verdict.take_rows(kept.rows)
        label = f"comparing answers ({len(chosen)} combinations)"
        with progress.task(label, len(chosen), unit="combinations") as reach:
            check_tokens(
                model,
                prompts,
                chosen,
                verdict,
                max_tokens=max_tokens,
                together=(1, 2, 1, 3, 1, 5, 1, 8),
                watch=reach,
                kept=kept,
            )
    rows = verdict.rows
    invariant = "are" if not rows.differing else "are NOT"
    lines = [
        f"rows: {rows.rows} compared, {rows.differing} differ"
        + (f" by up to {rows.largest_difference:.3g}" if rows.differing else ""),
        *(_condition_line(name, each) for name, each in verdict.conditions.items()),
        f"answers: {verdict.answers_compared} compared ({verdict.tokens_compared} tokens), "
        f"{len(verdict.answers_differing)} differ",
        *verdict.answers_differing[:10],
        f"verdict: {model.files.name} on the {model.engine.name} engine "
        f"{'is' if verdict.exact else 'is NOT'} exact here: rows {invariant} independent of how "
        "they are computed",
    ]
    value = {**about, "drafters": settings["drafters"], **verdict.as_dict()}
    return Report(value, verdict.exact, "\n".join(lines), journal=journal_path(output))


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
