"""`paceline bench trace`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from paceline.cli.console import print_report
from paceline.cli.options import Output, command, group

app = group()


@command(
    app,
    examples=("paceline bench trace trace.jsonl",),
)
def trace(
    *,
    trace: Annotated[Path, Argument(parser=Path, metavar="FILE", help="a trace")],
    output: Output,
) -> int:
    """Show what `generate --trace` wrote."""
    from paceline_lab.trace.command import bench_trace

    return print_report(bench_trace(trace), output)
