"""`paceline bench trace`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from paceline.cli import declare
from paceline.cli.console import check_writable, print_report
from paceline.cli.options import Output, command, group

app = group()


@command(
    app,
    examples=(
        "paceline bench trace trace.jsonl",
        "paceline bench trace trace.jsonl --output trace.html",
    ),
)
def trace(
    *,
    trace: Annotated[Path, Argument(parser=Path, metavar="FILE", help="a trace")],
    picture: Annotated[Path | None, declare.file("--output", help="an .html to draw it in")] = None,
    output: Output,
) -> int:
    """Show what `generate --trace` wrote."""
    from paceline_lab.trace.command import bench_trace

    check_writable(picture)
    return print_report(bench_trace(trace, picture), output)
