"""`paceline bench report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from paceline.cli import declare
from paceline.cli.console import print_value
from paceline.cli.options import Output, command


@command(
    examples=(
        "paceline bench report run.json --output report",
        "paceline bench report run.json lengths.json --output report",
    ),
)
def report(
    *,
    results: Annotated[
        list[Path], Argument(parser=Path, metavar="FILE", help="JSON of `bench ...`")
    ],
    folder: Annotated[Path, declare.folder("--output", help="folder for the page and the charts")],
    output: Output,
) -> int:
    """Draw charts of recorded results, and a web page with them."""
    from paceline_lab.report.files import write_report

    paths = [str(path) for path in write_report(results, folder)]
    print_value(output, {"written": paths}, "\n".join(paths))
    return 0
