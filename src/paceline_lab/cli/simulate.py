"""`paceline bench simulate`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli import declare
from paceline.cli.console import check_writable, load_model, obey_offline, print_report, progress_of
from paceline.cli.options import ModelOptions, Output, ResultFile, command, group
from paceline.errors import InvalidRequest
from paceline_lab.cli.options import ComparisonArguments

if TYPE_CHECKING:
    from paceline.runtime.model import Model

app = group()


@command(
    app,
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
            parser=Path, metavar="FILE...", help="JSON lines with prompt and answer, or a result"
        ),
    ],
    comparison: ComparisonArguments,
    cost: Annotated[
        str,
        Option(
            help="costs of calls: here, zaya, phi-4-mini, m5-max, or milliseconds by rows such as "
            "1=12,8=15.4"
        ),
    ] = "here",
    carry: Annotated[
        bool, Option("--carry", help="one process: a text learns from the texts before it")
    ] = False,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Answer recorded texts again, without their model."""
    from paceline.models import resolve
    from paceline_lab.simulate.command import bench_simulate

    check_writable(result)
    if not texts:
        raise InvalidRequest("bench simulate needs --texts FILE")
    obey_offline(model.offline)
    progress = progress_of(output)

    def load() -> "Model":
        return load_model(model, output, drafters=comparison.drafters)

    report = bench_simulate(
        load,
        lambda: resolve(model.model, progress=progress, revision=model.revision),
        **asdict(comparison),
        model=model.model,
        texts=texts,
        cost=cost,
        carry=carry,
        progress=progress,
    )
    return print_report(report, output, result)
