"""`paceline bench simulate`: recorded texts replayed through drafters and policies."""

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli import declare
from paceline.cli.console import check_writable, load_model, obey_offline, print_report, progress_of
from paceline.cli.options import ModelOptions, Output, ResultFile, command
from paceline.errors import InvalidRequest
from paceline.storage.report import Report
from paceline_lab.cli.options import ComparisonArguments

if TYPE_CHECKING:
    from paceline.decoding.costs import CostTable
    from paceline.models import ModelFiles


@command(
    examples=(
        "paceline bench simulate --texts answers.jsonl --drafter auto --drafter ngram",
        "paceline bench simulate --texts answers.jsonl --block 5 --block 9 --cost phi-4-mini",
    ),
)
def simulate(
    *,
    texts: Annotated[
        list[Path],
        declare.several(
            parser=Path,
            metavar="FILE",
            help="JSON lines with prompt and answer, or a recorded result",
        ),
    ],
    comparison: ComparisonArguments,
    cost: Annotated[
        str,
        Option(
            help="forward-pass costs: here, zaya, phi-4-mini, m5-max, or milliseconds by rows "
            "such as 1=12,8=15.4"
        ),
    ] = "here",
    carry: Annotated[
        bool,
        Option("--carry", help="let each text learn from the texts before it, as in one process"),
    ] = False,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Simulate drafters on recorded texts, without the model."""
    from paceline.models import resolve
    from paceline.runtime.request import check
    from paceline_lab.bench.ab_test import PLAIN, contender_options, options_facts
    from paceline_lab.bench.record import Record, here
    from paceline_lab.simulate.costs import parse_costs
    from paceline_lab.simulate.replay import drafter_resources
    from paceline_lab.simulate.replay import simulate as replay
    from paceline_lab.simulate.report import Total, rows_of, summary, tables
    from paceline_lab.simulate.texts import digest, read_texts

    check_writable(result)
    if not texts:
        raise InvalidRequest("bench simulate needs --texts FILE")
    obey_offline(model.offline)
    progress = progress_of(output)

    def files() -> "ModelFiles":  # opened only if text must be encoded
        return resolve(model.model, progress=progress, revision=model.revision)

    def measured() -> "CostTable":
        return load_model(model, output, drafters=comparison.drafters).measured_costs()

    options = contender_options(comparison.drafters, comparison.policies, comparison.blocks)
    options.pop(PLAIN, None)
    shared = drafter_resources(model.model, options, progress)
    recordings = read_texts(texts, files)
    costs = parse_costs(cost, measured)
    tokens = sum(len(recording.answer) for recording in recordings)
    began = perf_counter()
    totals = {}
    for name, settings in options.items():
        request = check(settings)
        with progress.task(f"simulating {name}", tokens, unit="tokens") as reach:
            totals[name] = Total(
                replay(recordings, request, costs.table, shared, carry=carry, watch=reach)
            )
    took = perf_counter() - began
    record = Record(
        "simulate",
        rows=[*rows_of(totals)],
        settings={
            "model": Path(model.model).name,
            "contenders": options_facts(options),
            "cost": costs.as_dict(),
            "carry": carry,
        },
        suite_sha256=digest(recordings),
        summary={name: summary(total) for name, total in totals.items()},
        **here(),
    )
    drafting = sum(total.sum(lambda one: one.draft_seconds) for total in totals.values())
    steps = sum(total.steps for total in totals.values())
    text = (
        f"{len(recordings)} texts, {tokens:,} tokens of answers, simulated in {took:.1f} s "
        f"({tokens * len(totals) / took:,.0f} tokens/s); drafting took "
        f"{1e6 * drafting / max(steps, 1):.0f} microseconds per step; costs: {costs.name}"
    )
    known = max(costs.table.seconds)
    used = 1 + max(len(total.counts["drafted_at"]) for total in totals.values())
    if used > known:
        text += f", extrapolated beyond {known} rows (blocks have up to {used})"
    return print_report(
        Report(record.as_dict(), text=text, tables=[*tables(totals)]), output, result
    )
