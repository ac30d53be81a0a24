"""`paceline plan`."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.console import check_writable, load_model, print_report
from paceline.cli.options import ModelOptions, Output, ResultFile, command, group

if TYPE_CHECKING:
    from paceline.runtime.model import Model

app = group()


@command(app)
def plan(
    *,
    again: Annotated[bool, Option("--again", help="measure anew")] = False,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Show the cost of a call by rows, and the acceptance at which drafting pays off.

    Of a GGUF file that two engines run, both are measured.
    """
    from dataclasses import replace

    from paceline.bench.plan.command import plan as run

    check_writable(result)

    def load(engine: str) -> "Model":
        return load_model(replace(model, engine=engine), output)

    report = run(load, model.engine, again=again)
    return print_report(report, output, result)
