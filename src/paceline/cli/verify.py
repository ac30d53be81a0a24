"""`paceline verify`: row invariance and token parity on this machine, as a verdict."""

import datetime
from collections.abc import Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from paceline.cli import declare
from paceline.cli.console import check_writable, load_model, print_report, progress_of
from paceline.cli.groups import load_command
from paceline.cli.options import (
    Command,
    MaxTokens,
    ModelOptions,
    Output,
    ResultFile,
    Suite,
    command,
)
from paceline.storage.report import Report

if TYPE_CHECKING:
    from paceline.engines.exact import RowComparison
    from paceline.runtime.model import Model
    from paceline.verify.checks import Verdict


_QUICK_ROWS_SECONDS = 20.0
_QUICK_SECONDS = 45.0
"""Seconds after the start, loading included, when a quick verification begins no further row or
answer comparison. The last one ends later: about a minute in all."""


class Verify(Command):
    """The command; with --url it is the lab's `verify.url`, whose options differ."""

    forms = ("--url",)

    def form(self, _choice: str = "") -> Any:
        return load_command("verify.url", "verify")

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        if any(word.partition("=")[0] == "--url" for word in args):
            return self.form().make_context(info_name, args, *rest, **extra)
        return super().make_context(info_name, args, *rest, **extra)


@command(
    kind=Verify,
    first=("model", "quick", "drafters", "json"),
    examples=(
        "paceline verify --quick  # in a minute",
        "paceline verify --url http://127.0.0.1:8000/v1  # any OpenAI-compatible server",
    ),
)
def verify(
    *,
    quick: Annotated[
        bool,
        Option("--quick", help="run a one-minute part and estimate the time of the full check"),
    ] = False,
    drafters: Annotated[
        list[str],
        declare.drafters(help="a drafter to check; may be repeated; default: all available ones"),
    ],
    suite: Suite = None,
    max_tokens: MaxTokens = 64,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Check that drafts change no token.

    With --url BASE, check a server; `paceline verify --url BASE --help` lists the options.
    """
    import paceline
    from paceline.drafters import DrafterSpec
    from paceline.runtime.request import check
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

    check_writable(result)
    started, progress = perf_counter(), progress_of(output)
    prompts = load_suite(suite)
    for name in drafters:
        check({"drafter": name})
    loaded = load_model(model, output, drafters=drafters)
    named = drafters or default_drafters(loaded)
    verdict = Verdict()
    parts: dict[str, dict[str, float]] = {}

    def compare(what: str, unit: str, checks: Sequence[Check], quick_seconds: float) -> None:
        began = perf_counter()
        with progress.task(f"comparing {what}", len(checks), unit=unit) as reach:
            done = run_checks(checks, reach, started + quick_seconds if quick else inf)
        parts[unit] = {"done": done, "of": len(checks), "seconds": perf_counter() - began}

    rows = [partial(loaded.call, check) for check in row_checks(loaded.engine, verdict)]
    compare("rows", "contexts", rows, _QUICK_ROWS_SECONDS)
    cases = verify_cases(named)
    answers = token_checks(loaded, prompts, cases, verdict, max_tokens=max_tokens)
    compare("answers", "combinations", answers, _QUICK_SECONDS)
    value = {
        "paceline": paceline.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": loaded.files.name,
        "fingerprint": loaded.files.fingerprint,
        "engine": loaded.engine.describe(),
        "suite_sha256": prompts.sha256,
        "prompts": len(prompts.prompts),
        "max_tokens": max_tokens,
        "quick": quick,
        "drafters": [DrafterSpec.parse(name).without_folders for name in named],
        "parts": parts,
        **verdict.as_dict(),
    }
    text = _text(loaded, verdict)
    if quick:
        compared = [f"{part['done']} of {part['of']} {unit}" for unit, part in parts.items()]
        seconds = sum(
            part["seconds"] * part["of"] / max(part["done"], 1) for part in parts.values()
        )
        text += (
            f"\nquick: {' and '.join(compared)} were compared; all of them take about "
            f"{max(seconds / 60, 1):.0f} min (without --quick)"
        )
    return print_report(Report(value, verdict.exact, text), output, result)


def _text(model: "Model", verdict: "Verdict") -> str:
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
        f"{'is' if verdict.exact else 'is NOT'} exact on this machine: rows {invariant} "
        "independent of how they are computed",
    ]
    return "\n".join(lines)


def _condition_line(name: str, compared: "RowComparison") -> str:
    rates = f"{compared.differing} of {compared.rows} differ"
    picks = f", {compared.other_picks} pick another token" if compared.differing else ""
    return f"  {name.replace('_', ' ')}: {rates}{picks}"
