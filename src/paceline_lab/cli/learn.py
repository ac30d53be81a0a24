"""`paceline learn`: a drafter for a model, from what the model says itself."""

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli import declare, numbers
from paceline.cli.console import obey_offline, print_report, progress_of
from paceline.cli.options import ModelArgument, Offline, Output, command, group

app = group()


@command(
    app,
    examples=(
        "paceline learn qwen3-0.6b  # overnight",
        "paceline learn --hours 1",
        "paceline forget  # removes what was learnt",
    ),
    bars={"tokens": ("hours",)},
)
def learn(
    *,
    model: ModelArgument,
    hours: Annotated[
        float, Option(parser=numbers.RealParser(0, 10_000, open=True), help="at most")
    ] = 8.0,
    tokens: Annotated[
        int | None, declare.count(help="tokens of answers to learn from, in place of a time")
    ] = None,
    prompts: Annotated[
        list[Path],
        declare.several(parser=Path, metavar="FILE...", help="JSON lines to answer first"),
    ],
    exclude: Annotated[
        list[Path],
        declare.several(
            parser=Path, metavar="FILE...", help="JSON lines whose prompts are not learnt from"
        ),
    ],
    engine: Annotated[str, Option(help="auto, llamacpp or mlx")] = "auto",
    offline: Offline = False,
    output: Output,
) -> int:
    """Learn to draft for a model.

    The model writes prompts and answers them; a table is counted from the answers. `auto` takes it
    if that makes other answers faster, and never changes one. The same command goes on.
    """
    from paceline_lab.learn.command import learn as run

    obey_offline(offline)
    report = run(
        model,
        engine=engine,
        hours=hours,
        tokens=tokens,
        prompts=prompts,
        exclude=exclude,
        progress=progress_of(output),
    )
    return print_report(report, output)
