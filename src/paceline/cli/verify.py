"""`paceline verify`."""

from typing import Annotated

from typer import Option

from paceline.cli import declare
from paceline.cli.console import check_writable, load_model, print_report, progress_of
from paceline.cli.options import MaxTokens, ModelOptions, Output, ResultFile, Suite, command, group

app = group()


@command(app)
def verify(
    *,
    whole: Annotated[
        bool, Option("--whole", help="every combination, not only a part that covers every pair")
    ] = False,
    drafter: Annotated[
        list[str], declare.several(help="check this one; may be repeated; default: all there are")
    ],
    suite: Suite = None,
    max_tokens: MaxTokens = 64,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Check row invariance and token parity on this machine."""
    from paceline.tools.bench.verify.command import verify as run

    check_writable(result)
    report = run(
        lambda: load_model(model, output, drafters=drafter),
        suite=suite,
        max_tokens=max_tokens,
        whole=whole,
        drafters=drafter,
        output=result,
        progress=progress_of(output),
    )
    return print_report(report, output, result)
