"""`paceline plan`."""

from typing import Annotated

from typer import Option

from paceline.cli.console import check_writable, load_model, print_report
from paceline.cli.options import ModelOptions, Output, ResultFile, command, group

app = group()


@command(app)
def plan(
    *,
    again: Annotated[bool, Option("--again", help="measure anew")] = False,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Show the cost of a call by rows, and the acceptance at which drafting pays off."""
    from paceline.tools.bench.plan.command import plan as run

    check_writable(result)
    report = run(load_model(model, output), again=again)
    return print_report(report, output, result)
