"""`paceline bench agent`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from paceline.cli.console import check_writable, load_model, print_report
from paceline.cli.options import ApiKey, ModelOptions, Output, ResultFile, Served, command, group
from paceline_lab.cli.options import Drafters, Rounds, measuring

app = group()


@command(
    app,
    examples=(
        "paceline bench agent --output agent.json",
        "paceline bench agent session.jsonl --drafter auto --drafter suffix",
        "paceline bench agent --url http://127.0.0.1:8080/v1",
    ),
    needs={"url": ("served_model", "api_key")},
)
def agent(
    *,
    session: Annotated[
        Path | None,
        Argument(
            parser=Path,
            metavar="[FILE]",
            help="messages with role and content, one JSON object a line; default: a coding "
            "session and one with documents",
        ),
    ] = None,
    drafter: Drafters,
    rounds: Rounds = 1,
    url: Annotated[
        str | None, Option(metavar="BASE", help="a server of the model, to send the same turns to")
    ] = None,
    served_model: Served = None,
    api_key: ApiKey = None,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Replay an agent's session, whose answers are recorded."""
    from paceline.client import Access
    from paceline_lab.agent.command import bench_agent

    check_writable(result)
    report = bench_agent(
        lambda: load_model(model, output, drafters=drafter),
        path=session,
        drafters=drafter,
        rounds=rounds,
        url=url,
        access=Access(served_model, api_key),
        output=result,
        progress=measuring(output),
    )
    return print_report(report, output, result)
