"""`paceline bench compare`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from paceline.cli.console import print_report
from paceline.cli.options import Output, command


@command(
    examples=(
        "paceline bench compare before.json after.json",
        "paceline bench compare before.json after.json --measure decode_tokens_per_second",
    ),
)
def compare(
    *,
    before: Annotated[Path, Argument(parser=Path, help="JSON of `bench ...`")],
    after: Annotated[Path, Argument(parser=Path, help="another one")],
    measure: Annotated[str, Option(help="the measure to compare")] = "ratio",
    force: Annotated[
        bool, Option("--force", help="compare results of different models or prompts")
    ] = False,
    output: Output,
) -> int:
    """Compare two recorded results."""
    from paceline_lab.bench.compare import bench_compare

    return print_report(bench_compare(before, after, measure=measure, force=force), output)
