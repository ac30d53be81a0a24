"""`paceline bench report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from paceline.cli.console import print_value
from paceline.cli.options import Output, command, group

app = group()


@command(
    app,
    examples=(
        "paceline bench report run.json --output report.html",
        "paceline bench report run.json lengths.json --output report",
    ),
)
def report(
    *,
    results: Annotated[
        list[Path], Argument(parser=Path, metavar="FILE", help="JSON of `bench ...`")
    ],
    folder: Annotated[
        Path,
        Option(
            "--output",
            parser=Path,
            metavar="PATH",
            help="a folder for page and pictures, or one .html",
        ),
    ],
    output: Output,
) -> int:
    """Draw recorded results: charts, and a page with them."""
    from paceline_lab.report.files import write_report

    paths = [str(path) for path in write_report(results, folder)]
    print_value(output, {"written": paths}, "\n".join(paths))
    return 0
