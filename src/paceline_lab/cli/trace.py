"""`paceline bench trace`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from paceline.cli import declare
from paceline.cli.console import check_writable, print_value
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
    from paceline_lab.trace.command import bench_trace, show

    check_writable(picture)
    result, recorded = bench_trace(trace, picture)
    if output.json or picture is not None:
        print_value(output, result, str(picture))
    else:
        show(recorded)
    return 0
